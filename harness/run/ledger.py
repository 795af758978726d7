"""The records of a run: groups of cells go to whoever measures them, and outcomes and progress come back."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import store_content
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.run_facts import Facts, Failure
from kvbench.harness.report.keep_map import SUFFIX
from kvbench.harness.report.task_report import OF_MACHINE
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.suite import Cell, labels

Wanted = Callable[[Sequence[Cell], Mapping[str, Record]], bool]  # whether to measure a group's cells; gets the records so far
Group = Sequence[Prepared]  # what is measured at once: one cell, or the cells of one model and task side by side


def groups(prepared: Sequence[Prepared]) -> list[Group]:
    """Cells that are measured at once: one alone, or those of one model, task and seed if the task measures side by side."""
    by_key: dict[str, list[Prepared]] = {}
    for item in prepared:
        cell = item.cell
        key = repr((cell.model, cell.task, cell.seed)) if item.task.measures == "time" else cell.id
        by_key.setdefault(key, []).append(item)
    return list(by_key.values())


def needs_machine(group: Group) -> bool:
    """Whether nothing else may run on the machine meanwhile: its figures are times or memory."""
    return group[0].task.measures in OF_MACHINE


@dataclass(frozen=True)
class KeepMapFile:
    """A finished keep map.

    Attributes:
        content: file that holds it, or the bytes of that file.
        steps: that were asked for.
    """

    content: Path | bytes
    steps: str


@dataclass(frozen=True)
class Outcome:
    """A measured cell.

    Attributes:
        metrics: its figures; None if it failed.
        failure: why it failed; None if it went well.
        trace: file with its trace, or the content; None if there is none.
        keep_map: None if none was asked for, the task has none, or it failed.
    """

    facts: dict[str, Any]
    metrics: Metrics | None = None
    failure: Failure | None = None
    trace: Path | bytes | None = None
    keep_map: KeepMapFile | None = None

    def with_contents(self) -> Outcome:
        """The outcome with the content of its files, for another process."""
        kept = self.keep_map
        if kept is not None and isinstance(kept.content, Path):
            kept = KeepMapFile(kept.content.read_bytes(), kept.steps)
        trace = self.trace.read_bytes() if isinstance(self.trace, Path) else self.trace
        return dataclasses.replace(self, trace=trace, keep_map=kept)


Done = Callable[[Prepared, Outcome], None]


def trace_suffix(item: Prepared) -> str:
    """End of the name of a cell's trace."""
    return item.task.trace or ".trace"  # a task without a trace leaves the file empty


class RunWatcher:
    """Receives the progress of a run. This one ignores it."""

    def begin(self, label: str, number: int, cells: int, total: int, worker: str = "") -> None:
        """A cell, or a group of cells side by side, starts. It has `total` tokens; 0 if tokens don't measure its progress.

        worker: that measures it; empty if this process does.
        """

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """`tokens` of what the worker measures are done; `text` is the figure so far."""

    def idle(self, worker: str) -> None:
        """A worker measures nothing now."""

    def note(self, label: str, text: str) -> None:
        """Something worth knowing about a policy; nothing if empty."""

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """A cell has its record; `skipped` if an earlier run wrote it."""


class Ledger:
    """The records of a run so far.

    Attributes:
        store: folder that they are written to.
        watcher: receives the progress.
        records: by cell id.
    """

    def __init__(self, store: RecordStore, watcher: RunWatcher, cells: Sequence[Cell]) -> None:
        """Begin without records. `cells` are all of the run."""
        self.store, self.watcher, self.records = store, watcher, dict[str, Record]()
        self._names = labels(cells)

    def begin(self, group: Group, worker: str = "") -> None:
        """Say that a group starts.

        Raises:
            UserError: the clock is wrong, which is better reported now than after the measurement.
        """
        for item in group:
            self.store.stamp(item.record, datetime.datetime.now(datetime.UTC))
        label = self._names[group[0].cell.id] if len(group) == 1 else f"{len(group)} cells side by side"
        total = 0 if group[0].task.measures == "time" else group[0].data.tokens
        self.watcher.begin(label, len(self.records) + 1, len(self._names), total, worker)

    def references(self, group: Group) -> list[Record | None]:
        """Return for each cell the record it is compared with while it is measured; None if there is none."""
        return [None if item.cell.reference is None else self.records[item.cell.reference.id] for item in group]

    def done(self, item: Prepared, outcome: Outcome) -> None:
        """Write a cell's record, its trace and its keep map.

        Raises:
            UserError: the folder can't be written to, or the clock is wrong.
        """
        result = {"status": "failed", "error": outcome.failure} if outcome.metrics is None else {"metrics": outcome.metrics}
        finished = self.store.stamp(item.record, datetime.datetime.now(datetime.UTC))
        try:
            facts = Facts.from_json(outcome.facts | self._store_keep_map(item, outcome.keep_map))
            record = dataclasses.replace(item.record, **result, facts=facts, finished=finished)  # type: ignore[arg-type]
            self.store.write(record, outcome.trace, trace_suffix(item))
        except OSError as error:
            raise UserError(
                f"{self.store.path(item.record)}: can't be written ({error.strerror}); finished cells are kept"
            ) from error
        self.records[item.cell.id] = record

    def _store_keep_map(self, item: Prepared, kept: KeepMapFile | None) -> dict[str, Any]:
        """Put a keep map in its place, and return the record's fact about it. Without one, that of an earlier record goes."""
        path = self.store.trace_path(item.record, SUFFIX)
        if kept is None:
            path.unlink(missing_ok=True)
            return {}
        return {"keep_map": {"file": path.name, "sha256": store_content(kept.content, path), "steps": kept.steps}}

    def end(self, group: Group, *, skipped: bool = False) -> None:
        """Say that all cells of a group have their records."""
        for item in group:
            self.watcher.end(self._names[item.cell.id], self.records[item.cell.id], skipped)
