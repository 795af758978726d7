"""Sections of a page, as the task declares them (`report/task.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.pairing import question, task_version
from kvbench.harness.report.task import task_of


def headline(record: Record) -> str:
    """The main figure of a finished cell, in words; empty if it failed."""
    return task_of(record).headline(record) if record.status == "ok" else ""


def heading(record: Record) -> str:
    """The heading of a section."""
    return task_of(record).heading(record)


def body(records: Sequence[Record]) -> list[str | Chart]:
    """Lines and charts of a section."""
    return task_of(records[0]).body(records)


def section_key(record: Record) -> str:
    """Groups records into sections: all that they share except the task's axes."""
    axes = task_of(record).axes
    if not axes:
        return question(record)
    cell = record.cell.as_json()
    task = {k: v for k, v in cell["task"].items() if k not in axes}
    return repr([cell["suite"], cell["suite_version"], cell["model"], task, "", *task_version(record)])
