"""The interface between a run and an executor, which measures its cells: groups go in, outcomes and progress come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kvbench.harness.records import Record, RecordStore, digest
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.run_facts import Failure
from kvbench.harness.report.task_report import OF_MACHINE
from kvbench.harness.run.keep_map_writer import FinishedMap, KeepMapWriter
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.suite import Cell

Wanted = Callable[[Sequence[Cell], Mapping[str, Record]], bool]  # whether to measure a group's cells; gets the records so far
Group = Sequence[Prepared]  # what is measured at once: one cell, or the cells of one model and task side by side


def groups(prepared: Sequence[Prepared]) -> list[Group]:
    """Cells that are measured at once: one alone, or those of one model, task and seed if the task measures side by side."""
    by_key: dict[str, list[Prepared]] = {}
    for item in prepared:
        cell = item.cell
        alone = "" if item.task.measures == "time" else cell.id
        by_key.setdefault(digest([cell.model.model_dump(), cell.task.model_dump(), cell.seed, alone]), []).append(item)
    return list(by_key.values())


def needs_machine(group: Group) -> bool:
    """Whether nothing else may run on the machine meanwhile: its figures are times or memory."""
    return group[0].task.measures in OF_MACHINE


@dataclass(frozen=True)
class Outcome:
    """A measured cell.

    Attributes:
        facts: of its record.
        metrics: its figures; None if it failed.
        failure: why it failed; None if it went well.
        trace: file with its trace, or the content; it may be empty. None if it failed.
        keep_map: None if none was asked for, the task has none, or it failed.
    """

    facts: dict[str, Any]
    metrics: Metrics | None
    failure: Failure | None
    trace: Path | bytes | None
    keep_map: KeepMapWriter | FinishedMap | None

    def with_contents(self) -> Outcome:
        """The outcome with the content of its files, for another process."""
        trace = self.trace.read_bytes() if isinstance(self.trace, Path) else self.trace
        keep_map = self.keep_map.finished() if isinstance(self.keep_map, KeepMapWriter) else self.keep_map
        return replace(self, trace=trace, keep_map=keep_map)


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


class Ledger(Protocol):
    """Interface of a run that executors use: its records, and callbacks for groups and outcomes."""

    store: RecordStore
    watcher: RunWatcher
    records: dict[str, Record]  # by cell id

    def begin(self, group: Group, worker: str = "") -> None:
        """Say that a group starts.

        Raises:
            UserError: the clock is wrong.
        """

    def references(self, group: Group) -> list[Record | None]:
        """Return for each cell the record it is compared with while it is measured; None if there is none."""

    def done(self, item: Prepared, outcome: Outcome) -> None:
        """Write a cell's record.

        Raises:
            UserError: it can't be written.
        """

    def end(self, group: Group) -> None:
        """Say that all cells of a group have their records."""


class Executor(Protocol):
    """Measures groups of cells."""

    def measure(self, groups: Sequence[Group], cells: Sequence[Cell], ledger: Ledger) -> None:
        """Measure all groups, and hand the outcome of every cell to the ledger.

        A group comes after those that it needs a record of. `cells` are all of the run, finished ones included.

        Raises:
            UserError: a model can't be driven exactly, a cache doesn't fit, or a record can't be written.
        """
