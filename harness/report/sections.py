"""Tables of records by task, as the task declares them (`report/task.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from kvbench.harness.records import Record, newest
from kvbench.harness.report.chart import Page, page
from kvbench.harness.report.charts import over_steps
from kvbench.harness.report.groups import order
from kvbench.harness.report.markdown import md
from kvbench.harness.report.pairing import question, task_version
from kvbench.harness.report.task import task_of


def headline(record: Record) -> str:
    """The main figure of a finished cell, in words; empty if it failed."""
    return task_of(record).headline(record) if record.status == "ok" else ""


def section_key(record: Record) -> str:
    """Groups records into sections: all that they share except the task's axes."""
    axes = task_of(record).axes
    if not axes:
        return question(record)
    cell = record.cell.as_json()
    task = {k: v for k, v in cell["task"].items() if k not in axes}
    return repr([cell["suite"], cell["suite_version"], cell["model"], task, "", *task_version(record)])


def section(record: Record, records: Iterable[Record]) -> Page:
    """The table of a record's task, with a row for each record of the same suite, model and task.

    If the model is one that a pretraining kept on the way, curves over the steps of the training come first.
    """
    suite = [r for r in newest([*records, record]) if _suite(r) == _suite(record)]
    cell, task = record.cell, task_of(record)
    rows = sorted((r for r in suite if section_key(r) == section_key(record)), key=order)
    of_what = f"{md(cell.suite)} v{md(cell.suite_version)}: {md(cell.model.id)}, {md(cell.model.dtype)}.\n"
    curves = over_steps.body(cell.suite, suite) if over_steps.KEPT.fullmatch(cell.model.id) else []
    return page([*curves, f"## {md(task.heading(record))}\n", of_what, *task.body(rows)])


def _suite(record: Record) -> tuple[str, int]:
    return record.cell.suite, record.cell.suite_version
