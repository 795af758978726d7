"""How records of a task are shown: as the task declares (`report/task.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.pairing import question
from kvbench.harness.report.task import task_of


def headline(record: Record) -> str:
    """The figure of a finished cell, in words."""
    return task_of(record).headline(record) if record.status == "ok" else ""


def heading(record: Record) -> str:
    """What a section is called."""
    return task_of(record).heading(record)


def body(records: Sequence[Record]) -> list[str | Chart]:
    """Lines of a section, and its charts."""
    return task_of(records[0]).body(records)


def section_key(record: Record) -> str:
    """What the records of one section have in common."""
    axes = task_of(record).axes
    if not axes:
        return question(record)
    cell = record.cell.as_json()
    task = {k: v for k, v in cell["task"].items() if k not in axes}
    return repr([cell["suite"], cell["suite_version"], cell["model"], task, ""])
