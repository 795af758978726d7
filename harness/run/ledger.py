"""Records of a run: the groups of cells to measure, their outcomes and their progress."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import store_content
from kvbench.harness.core.grouped import grouped
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.run_facts import Facts, Failure
from kvbench.harness.report.keep_map import SUFFIX
from kvbench.harness.report.task_report import OF_MACHINE
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.run.request import KeepSteps
from kvbench.harness.suite import Cell, labels

Wanted = Callable[[Sequence[Cell], Mapping[str, Record]], bool]  # returns whether to measure a group; gets the records so far
Group = Sequence[Prepared]  # cells measured at once: one cell, or the cells of one model and task side by side


def groups(prepared: Sequence[Prepared]) -> list[Group]:
    """Group the cells that are measured at once: single cells, or all of a model, task and seed for tasks that measure time."""

    def key(item: Prepared) -> str:
        cell = item.cell
        return repr((cell.model, cell.task, cell.seed)) if item.task.measures == "time" else cell.id

    return list(grouped(prepared, key).values())


def needs_machine(group: Group) -> bool:
    """Return whether a group must run alone on its machine, because its figures are times or memory."""
    return group[0].task.measures in OF_MACHINE


@dataclass(frozen=True)
class Outcome:
    """Outcome of a cell's measurement.

    Attributes:
        metrics: figures of the cell; None if it failed.
        failure: error of the cell; None if it succeeded.
        trace: file of the trace, or the content of the file; None if there is no trace.
        keep_map: likewise of the keep map; None if it was not requested, the task has no keep maps, or the cell failed.
    """

    facts: dict[str, Any]
    metrics: Metrics | None = None
    failure: Failure | None = None
    trace: Path | bytes | None = None
    keep_map: Path | bytes | None = None

    def with_contents(self) -> Outcome:
        """Return the outcome with the content of its files, for another process."""
        trace, kept = (x.read_bytes() if isinstance(x, Path) else x for x in (self.trace, self.keep_map))
        return dataclasses.replace(self, trace=trace, keep_map=kept)


Done = Callable[[Prepared, Outcome], None]


def trace_suffix(item: Prepared) -> str:
    """Return the end of the file name of a cell's trace."""
    return item.task.trace or ".trace"  # a task without a trace leaves the file empty


class RunWatcher:
    """Receives the progress of a run. This base class ignores it."""

    def begin(self, label: str, number: int, cells: int, total: int, worker: str = "") -> None:
        """Receive the start of a cell, or of a group of cells side by side.

        Args:
            total: number of tokens; 0 if tokens don't measure the progress.
            worker: name of the worker that measures; empty for this process.
        """

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """Receive the progress of a worker. tokens: number of tokens done; text: figure so far."""

    def idle(self, worker: str) -> None:
        """Receive that a worker measures nothing now."""

    def note(self, label: str, text: str) -> None:
        """Receive a note about a policy; there is no note if `text` is empty."""

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """Receive the record of a cell; `skipped` if an earlier run wrote it."""


class Ledger:
    """Records of a run so far.

    Attributes:
        store: folder of the records.
        watcher: receives the progress.
        records: records by cell id.
    """

    def __init__(self, store: RecordStore, watcher: RunWatcher, cells: Sequence[Cell], keep: KeepSteps | None) -> None:
        """Create a ledger without records. cells: all cells of the run; keep: steps of its keep maps."""
        self.store, self.watcher, self.records = store, watcher, dict[str, Record]()
        self._names, self._keep = labels(cells), keep

    def begin(self, group: Group, worker: str = "") -> Group:
        """Report that a group starts. Return the group with the records of its cells' references.

        Raises:
            UserError: the clock is wrong. The check is repeated after the measurement.
        """
        for item in group:
            self.store.stamp(item.record, datetime.datetime.now(datetime.UTC))
        label = self._names[group[0].cell.id] if len(group) == 1 else f"{len(group)} cells side by side"
        total = 0 if group[0].task.measures == "time" else group[0].data.tokens
        self.watcher.begin(label, len(self.records) + 1, len(self._names), total, worker)
        references = [item.cell.reference for item in group]
        records = [None if cell is None else self.records[cell.id] for cell in references]
        return [dataclasses.replace(item, reference=record) for item, record in zip(group, records, strict=True)]

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

    def _store_keep_map(self, item: Prepared, kept: Path | bytes | None) -> dict[str, Any]:
        """Move a keep map to its place, and return the record's fact about it. Without a map, remove an earlier record's map."""
        path = self.store.trace_path(item.record, SUFFIX)
        if kept is None or self._keep is None:
            path.unlink(missing_ok=True)
            return {}
        return {"keep_map": {"file": path.name, "sha256": store_content(kept, path), "steps": self._keep.text}}

    def end(self, group: Group, *, skipped: bool = False) -> None:
        """Report that all cells of a group have records."""
        for item in group:
            self.watcher.end(self._names[item.cell.id], self.records[item.cell.id], skipped)
