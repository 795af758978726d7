"""Measures cells and writes their records. Skips finished cells; a failed cell gets a record too, and the others still run."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.run_facts import Facts
from kvbench.harness.run.executor import Executor, Group, Ledger, Outcome, RunWatcher, Wanted, groups, trace_suffix
from kvbench.harness.run.keep_map_writer import refuse_unmappable, settle_map, steps_wanted
from kvbench.harness.run.machine import Machine
from kvbench.harness.run.options import RunOptions
from kvbench.harness.run.prepare import MachineFacts, Prepared, prepare
from kvbench.harness.suite import Cell, labels


def run(
    cells: Sequence[Cell],
    store: RecordStore,
    options: RunOptions,
    watcher: RunWatcher,
    executor: Executor | None = None,
    measured_on: MachineFacts | None = None,
    wanted: Wanted | None = None,
) -> list[Record]:
    """Measure every cell that is not finished.

    A cell comes after its reference. Without an executor, this process measures, and leaves out the groups that are not `wanted`
    when their turn comes; `measured_on` is the machine if it is another.

    Returns:
        One record per measured cell, those of earlier runs included, in the order of the cells.

    Raises:
        UserError: a model's files, its tokenizer or the data are not available: raised before anything is measured. Or a
            model can't be driven exactly, or a cache doesn't fit: raised before any cell of that model is measured.
    """
    prepared = prepare(cells, options.device, options.data, measured_on)
    if options.keep is not None:
        refuse_unmappable(prepared, options.keep)
    with ExitStack() as locks:
        for suite in sorted({cell.suite for cell in cells}):
            locks.enter_context(store.locked(suite))
        book = _Book(store, watcher, labels(cells))
        left = [group for group in groups(prepared) if not book.skip(group, options)]
        if left:
            (executor or _InProcess(options, wanted)).measure(left, cells, book)
        return [book.records[cell.id] for cell in cells if cell.id in book.records]


class _InProcess:
    """Measures one group after the other in this process."""

    def __init__(self, options: RunOptions, wanted: Wanted | None) -> None:
        self._options, self._wanted = options, wanted

    def measure(self, groups: Sequence[Group], cells: Sequence[Cell], ledger: Ledger) -> None:
        """See `Executor`."""
        machine = Machine(self._options, cells)
        try:
            for group in groups:
                if self._wanted is not None and not self._wanted([item.cell for item in group], ledger.records):
                    continue
                ledger.begin(group)
                machine.measure(group, ledger.references(group), ledger.store, ledger.watcher, ledger.done)
                ledger.end(group)  # here, because a reader of stderr that is gone ends the run, and fails no cell
        finally:
            machine.close()


class _Book:
    """The records of a run so far.

    Attributes:
        store: folder that they are written to.
        watcher: receives the progress.
        records: by cell id.
    """

    def __init__(self, store: RecordStore, watcher: RunWatcher, names: dict[str, str]) -> None:
        self.store, self.watcher, self.records = store, watcher, dict[str, Record]()
        self._names = names

    def skip(self, group: Group, options: RunOptions) -> bool:
        """Whether all cells of a group are finished. Then their records are those of earlier runs."""
        if options.fresh:
            return False
        finished = [self.store.finished(item.record, steps_wanted(item, options.keep)) for item in group]
        if not all(finished):
            return False
        for item, record in zip(group, finished, strict=True):
            assert record is not None
            self.records[item.cell.id] = record
        self.end(group, skipped=True)
        return True

    def begin(self, group: Group, worker: str = "") -> None:
        """Say that a group starts. A wrong clock is reported now, not after the measurement."""
        for item in group:
            self.store.stamp(item.record, datetime.datetime.now(datetime.UTC))
        label = self._names[group[0].cell.id] if len(group) == 1 else f"{len(group)} cells side by side"
        total = 0 if group[0].task.measures == "time" else group[0].data.tokens
        self.watcher.begin(label, len(self.records) + 1, len(self._names), total, worker)

    def references(self, group: Group) -> list[Record | None]:
        """Return for each cell the record it is compared with while it is measured; None if there is none."""
        return [None if item.cell.reference is None else self.records[item.cell.reference.id] for item in group]

    def done(self, item: Prepared, outcome: Outcome) -> None:
        """Write a cell's record."""
        self.records[item.cell.id] = _write_record(item, outcome, self.store)

    def end(self, group: Group, *, skipped: bool = False) -> None:
        """Say that all cells of a group have their records."""
        for item in group:
            self.watcher.end(self._names[item.cell.id], self.records[item.cell.id], skipped)


def _write_record(item: Prepared, outcome: Outcome, store: RecordStore) -> Record:
    """Complete the cell's record, and write it with its trace and its keep map.

    Raises:
        UserError: the folder can't be written to, or the clock is wrong.
    """
    result: dict[str, Any] = {"status": "failed", "error": outcome.failure}
    if outcome.metrics is not None:
        result = {"metrics": outcome.metrics}
    finished = store.stamp(item.record, datetime.datetime.now(datetime.UTC))
    record = dataclasses.replace(item.record, **result, facts=Facts.from_json(outcome.facts), finished=finished)
    trace = outcome.trace
    empty = trace is None or not (trace if isinstance(trace, bytes) else trace.stat().st_size)
    try:
        settle_map(outcome.keep_map, record, store)
        store.write(record, None if empty else trace, trace_suffix(item))
    except OSError as error:
        raise UserError(f"{store.path(record)}: can't be written ({error.strerror}); finished cells are kept") from error
    return record
