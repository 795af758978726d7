"""Any task: its plain numbers, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.markdown import asked, count, label, md, number, status, table

AXES: tuple[str, ...] = ()


def headline(record: Record) -> str:
    """The first plain number."""
    return next((f"{name} {number(record.metrics[name])}" for name in _plain(record)), "")


def body(records: Sequence[Record]) -> list[str]:
    """One row a record, one column a plain number."""
    names = list(dict.fromkeys(name for r in records for name in _plain(r)))
    rows = [[label(r), count(r.cell["capacity"]), *(number(r.metrics.get(name)) for name in names), status(r)] for r in records]
    return [asked(records[0]), *table(["policy", "capacity", *map(md, names), "status"], rows, "lr" + "r" * len(names) + "l")]


def _plain(record: Record) -> list[str]:
    return [k for k, v in record.metrics.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
