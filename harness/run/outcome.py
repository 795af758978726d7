"""What a measurement of a cell gives, wherever it ran, and the record that is written from it."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.facts import Facts, Failure
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.run.keep_map import KeepMap, ReceivedMap, settle_map
from kvbench.harness.run.prepare import Prepared


@dataclass(frozen=True)
class Outcome:
    """A measured cell.

    Attributes:
        facts: of its record.
        metrics: its figures; None if it failed.
        failure: why it failed; None if it went well.
        trace: file with its trace, which may be empty; None if it failed.
        keep_map: None if none was asked for, the task has none, or it failed.
    """

    facts: dict[str, Any]
    metrics: Metrics | None
    failure: Failure | None
    trace: Path | None
    keep_map: KeepMap | ReceivedMap | None


def write_record(item: Prepared, outcome: Outcome, store: RecordStore) -> Record:
    """Complete the cell's record, and write it with its trace and its keep map.

    Raises:
        UserError: the folder can't be written to, or the clock is wrong.
    """
    result: dict[str, Any] = {"status": "failed", "error": outcome.failure}
    if outcome.metrics is not None:
        result = {"metrics": outcome.metrics}
    finished = store.stamp(item.record, datetime.datetime.now(datetime.UTC))
    record = dataclasses.replace(item.record, **result, facts=Facts.from_json(outcome.facts), finished=finished)
    has_trace = outcome.trace is not None and outcome.trace.stat().st_size > 0
    try:
        settle_map(outcome.keep_map, record, store)
        store.write(record, outcome.trace if has_trace else None, trace_suffix(item))
    except OSError as error:
        raise UserError(f"{store.path(record)}: can't be written ({error.strerror}); finished cells are kept") from error
    return record


def trace_suffix(item: Prepared) -> str:
    """End of the name of a cell's trace."""
    return item.task.trace or ".trace"  # a task without a trace leaves the file empty
