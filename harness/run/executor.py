"""Who measures the groups of a run. The process that asked writes the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.run.group import Group
from kvbench.harness.run.machine import Machine
from kvbench.harness.run.options import RunOptions
from kvbench.harness.run.outcome import Outcome
from kvbench.harness.run.prepare import Prepared
from kvbench.harness.run.watcher import Watcher
from kvbench.harness.suite import Cell


class Ledger(Protocol):
    """What a run offers to whoever measures its cells."""

    store: RecordStore
    watcher: Watcher

    def begin(self, group: Group, worker: str = "") -> None:
        """Say that a group starts.

        Raises:
            UserError: the clock is wrong.
        """

    def references(self, group: Group) -> list[Record | None]:
        """For each cell, the record that it is compared with while it is measured; None if there is none."""

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

        Args:
            groups: to measure, each after those that it needs a record of.
            cells: all of the run, finished ones included.
            ledger: of the run.

        Raises:
            UserError: a model can't be driven exactly, a cache doesn't fit, or a record can't be written.
        """


class InProcess:
    """Measures one group after the other in this process."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options

    def measure(self, groups: Sequence[Group], cells: Sequence[Cell], ledger: Ledger) -> None:
        """See `Executor`."""
        machine = Machine(self._options, cells, ledger.store)
        try:
            for group in groups:
                ledger.begin(group)
                machine.measure(group, ledger.references(group), ledger.watcher, ledger.done)
                ledger.end(group)  # here, because a reader of stderr that is gone ends the run, and fails no cell
        finally:
            machine.close()
