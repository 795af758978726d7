"""Measure cells and write their records. Finished cells are skipped; failed cells get records, and the run continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.run.keep_map_writer import mapped_steps, refuse_unmappable
from kvbench.harness.run.ledger import Group, Ledger, RunWatcher, Wanted, groups
from kvbench.harness.run.machine import Machine
from kvbench.harness.run.prepare import MachineFacts, prepare
from kvbench.harness.run.request import RunOptions
from kvbench.harness.suite import Cell

Executor = Callable[[Sequence[Group], Sequence[Cell], Ledger], None]  # measures groups; the cells are all cells of the run


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

    Each cell must come after its reference. Without an executor, this process measures, and skips groups that `wanted` rejects
    when their turn comes. `measured_on` describes the machine that measures; None means this machine.

    Returns:
        One record per measured cell, in the order of the cells. Records of earlier runs are included.

    Raises:
        UserError: before any measurement: a model's files, its tokenizer or the data are not available, or a policy breaks a
            rule. Before the first cell of a model: the model can't be driven exactly, or a cache doesn't fit.
    """
    prepared = prepare(cells, options.device, options.data, measured_on)
    if options.keep is not None:
        refuse_unmappable(prepared, options.keep)
    with ExitStack() as locks:
        for suite in sorted({cell.suite for cell in cells}):
            locks.enter_context(store.locked(suite))
        ledger = Ledger(store, watcher, cells, options.keep)
        left = [group for group in groups(prepared) if options.fresh or not _is_finished(group, ledger, options)]
        if left:
            (executor or partial(_measure_here, options, wanted))(left, cells, ledger)
        return [ledger.records[cell.id] for cell in cells if cell.id in ledger.records]


def _is_finished(group: Group, ledger: Ledger, options: RunOptions) -> bool:
    """Return whether earlier runs finished all cells of a group. If so, this run takes over their records."""
    stored, keep = {}, options.keep
    for item in group:
        steps = None if keep is None or mapped_steps(item, keep) is None else keep.text
        record = ledger.store.finished(item.record, steps)
        if record is None:
            return False
        stored[item.cell.id] = record
    ledger.records |= stored
    ledger.end(group, skipped=True)
    return True


def _measure_here(
    options: RunOptions, wanted: Wanted | None, groups: Sequence[Group], cells: Sequence[Cell], ledger: Ledger
) -> None:
    """Measure one group after another in this process."""
    machine = Machine(options, cells)
    try:
        for group in groups:
            if wanted is not None and not wanted([item.cell for item in group], ledger.records):
                continue
            machine.measure(ledger.begin(group), ledger.store, ledger.watcher, ledger.done)
            ledger.end(group)  # after `measure`, because a closed stderr must end the run without a failed cell
    finally:
        machine.close()
