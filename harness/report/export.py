"""Records as a table with a row per record: the table of `bench run`, and all figures for pandas and spreadsheets.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.grouped import distinguishing_keys, grouped
from kvbench.harness.core.shown import visible
from kvbench.harness.records import Problem, Record, RecordStore, newest
from kvbench.harness.report.pairing import common_tokens, on_common, question
from kvbench.harness.report.rows import Row, short_titles
from kvbench.harness.report.sections import headline

if TYPE_CHECKING:
    from pandas import DataFrame


class Records(list[Record]):
    """A list of records.

    Attributes:
        problems: files that could not be read as records, each with the reason.
    """

    def __init__(self, records: Iterable[Record] = (), problems: Iterable[Problem] = ()) -> None:
        super().__init__(records)
        self.problems = list(problems)

    def to_frame(self) -> DataFrame:
        """Return rows of `policy`, `capacity`, `model.id`, `task.name`, `parameters.sinks`, `metrics.nll`, `facts.seconds`.

        Lists (buckets, blocks, rounds) are left out; the records have them.
        """
        from pandas import DataFrame

        return DataFrame.from_records(rows(self))

    def _repr_html_(self) -> str:
        """Return the table that `bench run` prints, as HTML for notebooks."""
        from pandas import DataFrame

        return str(DataFrame.from_records(summary_rows(self)).to_html(index=False, na_rep=""))


def load_records(folder: str | Path, *, all_versions: bool = False) -> Records:
    """Read the records of a folder.

    Args:
        folder: the folder given to `bench run --results`.
        all_versions: include older records of a cell, not only the newest.

    Raises:
        UserError: `folder` is a file.
    """
    records, problems = RecordStore(Path(folder).expanduser()).read_all()
    return Records(records if all_versions else newest(records), problems)


def summary_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one row per record. A figure of a text is over the whole text, as far as all records of its question read it.

    Bytes are those of the tables: held, where a cache grows. Models, tasks, options and parameters are shown where records
    differ in them.
    """
    models, by_question = {r.cell.model.id for r in records}, grouped(records, question)
    tasks = _task_names(records)
    return [
        {
            **({"model": r.cell.model.id} if len(models) > 1 else {}),
            **({"task": task} if len(set(tasks)) > 1 else {}),
            "policy": policy,
            "capacity": r.cell.capacity,
            "figure": headline(on_common(r, common_tokens(by_question[question(r)])) or r),
            "K/V bytes": Row([r]).kv_bytes,
            "tokens/s": None if r.facts.tokens_per_second is None else round(r.facts.tokens_per_second),
            "status": f"failed: {r.failure}" if r.failure else "flagged" if r.metrics.flags else "ok",
            "cell": r.cell_id[:8],
        }
        for r, task, policy in zip(records, tasks, short_titles(records), strict=True)
    ]


def _task_names(records: Sequence[Record]) -> list[str]:
    """Return names of tasks, with the options that tell records of one task apart."""
    names = []
    for record in records:
        name, options = record.cell.task.name, record.cell.as_json()["task"]
        keys = distinguishing_keys([r.cell.as_json()["task"] for r in records if r.cell.task.name == name])
        names.append(" ".join([name, *(f"{k} {options[k]}" for k in keys if k in options)]))
    return names


FORMATS = (".parquet", ".csv")


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one row per record: `model.id`, `task.tokens`, `parameters.sinks`, `metrics.nll`, `facts.device` and so on.

    Lists (buckets, blocks, rounds) are left out; the records have them.
    """
    table = []
    for record in records:
        own = {
            "cell_id": record.cell_id,
            "key": record.key,
            "status": record.status,
            "finished": record.finished,
            "error": record.error.kind if record.error else None,
        }
        row: dict[str, Any] = dict(own)
        for name, part in (("", record.cell), ("metrics.", record.metrics), ("data.", record.data), ("facts.", record.facts)):
            row |= _flat(name, part.as_json())
        table.append(row | own)  # an option of the same name must not hide these
    return table


def write(records: Sequence[Record], path: Path) -> int:
    """Write the table as Parquet or CSV, by the file's suffix. Return the number of columns.

    Raises:
        UserError: the suffix is unknown.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if path.suffix not in FORMATS:
        raise UserError(f"{path}: a table is written as {' or '.join(FORMATS)}: change the suffix")
    flat = rows(records)
    if path.suffix == ".csv":
        flat = [{_defused(name): _defused(value) for name, value in row.items()} for row in flat]
    columns = {name: _column([row.get(name) for row in flat]) for name in dict.fromkeys(k for row in flat for k in row)}
    table = pa.table(columns)
    with atomic_write(path, "wb") as file:
        (parquet.write_table if path.suffix == ".parquet" else csv.write_csv)(table, file)
    return len(columns)


def _defused(value: Any) -> Any:
    """Return text that a spreadsheet won't run as a formula, with invisible characters removed; numbers unchanged.

    Source: OWASP, CSV Injection: put an apostrophe before a leading = + - @, tab or carriage return.
    """
    if not isinstance(value, str):
        return value
    return f"'{visible(value)}" if value.lstrip()[:1] in tuple("=+-@") or value[:1] in ("\t", "\r") else visible(value)


def _flat(prefix: str, part: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, dict):
            flat |= _flat(f"{prefix}{name}.", value)
        elif not isinstance(value, list):
            flat[f"{prefix}{name}"] = value
    return flat


def _column(values: list[Any]) -> list[Any]:
    """Return values of one type: numbers if all are numbers, else text."""
    kinds = {type(v) for v in values if v is not None}
    if len(kinds) <= 1:
        return values
    if kinds == {int, float}:
        return [None if v is None else float(v) for v in values]
    return [None if v is None else str(v) for v in values]
