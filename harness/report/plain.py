"""Defaults for any task: its plain numbers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.records.rules import compared
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, judge_interval
from kvbench.harness.report.markdown import count, label, md, number, status, table, task_line

_COMPARED_FOR_EVERY_TASK = ("kv_bytes", "state_bytes")


def headline(record: Record, columns: Sequence[str] = ()) -> str:
    """The first plain number."""
    figures = _plain(record)
    return next((f"{name} {number(figures[name])}" for name in columns or figures if name in figures), "")


def body(records: Sequence[Record], columns: Sequence[str] = ()) -> list[str | Chart]:
    """One row per record, one column per plain number."""
    names = list(columns) or list(dict.fromkeys(name for r in records for name in _plain(r)))
    rows = []
    for record in records:
        figures = _plain(record)
        rows.append([
            label(record), count(record.cell.capacity), *(number(figures.get(name)) for name in names), status(record),
        ])  # fmt: skip
    heads = [md(_title(records[0], name)) for name in names]
    return [task_line(records[0]), *table(["policy", "capacity", *heads, "status"], rows, "lr" + "r" * len(names) + "l")]


def differences(a: Record, b: Record) -> list[Difference]:
    """Compare the figures that declare which way is better; if none does, all plain numbers."""
    x, y = _plain(a), _plain(b)
    marks = compared(type(b.metrics))
    result = []
    for name in (n for n in (marks or x) if n in x and n in y and n not in _COMPARED_FOR_EVERY_TASK):
        change = y[name] - x[name]
        if name in marks:
            verdict = judge_interval(change, change, marks[name].margin, marks[name].more_is_better)
            result.append(Difference(name, x[name], y[name], change, change, change, verdict))
        elif not change:
            result.append(Difference(name, x[name], y[name], 0.0, 0.0, 0.0, "same"))
        else:
            result.append(
                Difference(name, x[name], y[name], change, None, None, "can't tell", "its task doesn't say which way is better")
            )
    return result


def _plain(record: Record) -> dict[str, Any]:
    return {k: v for k, v in record.metrics.as_json().items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _title(record: Record, name: str) -> str:
    """Heading of a column: the field's title, or its name."""
    field = type(record.metrics).model_fields.get(name)
    return (field.title if field is not None else None) or name
