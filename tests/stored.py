"""A few published records of every kind, for tests; and copies of records to change."""

from __future__ import annotations

from pathlib import Path

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.beside import TraceFile, open_trace

RECORDS = Path(__file__).parent / "records"


def working_copy(source: Path, target: Path) -> Path:
    """Write the records of a folder of either form, and their traces, into a working folder."""
    for path, record in RecordStore(source).files():
        assert isinstance(record, Record), record
        written, trace = RecordStore(target).write(record), open_trace(record, path.parent)
        if record.trace is not None and isinstance(trace, TraceFile):
            written.with_name(record.trace.file).write_bytes(trace.getvalue())
    return target
