"""Records as one flat table, for pandas and spreadsheets: a row a record, a column a plain figure. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record

FORMATS = (".parquet", ".csv")


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row a record: `model.id`, `task.tokens`, `parameters.sinks`, `metrics.nll`, `facts.device` and so on.

    Lists (buckets, blocks, rounds) are left out: they are in the records.
    """
    made = []
    for record in records:
        own = {
            "cell_id": record.cell_id, "key": record.key, "status": record.status, "finished": record.finished,
            "error": record.error.kind if record.error else None,
        }  # fmt: skip
        row: dict[str, Any] = dict(own)
        for name, part in (("", record.cell), ("metrics.", record.metrics), ("data.", record.data), ("facts.", record.facts)):
            row |= _flat(name, part.as_json())
        made.append(row | own)  # whatever a cell calls its options
    return made


def write(records: Sequence[Record], path: Path) -> int:
    """Write the table: parquet or CSV by the name's end. Returns the number of columns.

    Raises:
        UserError: another end, or it can't be written.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.suffix not in FORMATS:
        raise UserError(f"{path}: can be written as {' or '.join(FORMATS)}")
    flat = rows(records)
    if path.suffix == ".csv":
        flat = [{_defused(name): _defused(value) for name, value in row.items()} for row in flat]
    columns = {name: _column([row.get(name) for row in flat]) for name in dict.fromkeys(k for row in flat for k in row)}
    table = pa.table(columns)
    try:
        with atomic_write(path, "wb") as file:
            (parquet.write_table if path.suffix == ".parquet" else csv.write_csv)(table, file)
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror or error})") from None
    return len(columns)


def _defused(value: Any) -> Any:
    """Text that no spreadsheet takes for a formula, and in which nothing is invisible; numbers as they are.

    Source: OWASP, CSV Injection: a leading = + - @, tab or carriage return gets an apostrophe before it.
    """
    if not isinstance(value, str):
        return value
    return f"'{visible(value)}" if value.lstrip()[:1] in tuple("=+-@") or value[:1] in ("\t", "\r") else visible(value)


def _flat(prefix: str, part: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, dict):
            found |= _flat(f"{prefix}{name}.", value)
        elif not isinstance(value, list):
            found[f"{prefix}{name}"] = value
    return found


def _column(values: list[Any]) -> list[Any]:
    """Of one type: numbers where all are, text otherwise."""
    kinds = {type(v) for v in values if v is not None}
    if len(kinds) <= 1:
        return values
    if kinds == {int, float}:
        return [None if v is None else float(v) for v in values]
    return [None if v is None else str(v) for v in values]
