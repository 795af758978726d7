"""Records in the order of pages, and tables of them by task, as the task declares them (`report/task.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

from kvbench.harness.records import Record, newest
from kvbench.harness.report.chart import Chart, Page, page
from kvbench.harness.report.charts import over_steps
from kvbench.harness.report.markdown import md
from kvbench.harness.report.pairing import question, task_version
from kvbench.harness.report.task import task_of


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """The newest record of every cell, grouped by suite and model."""
    shown = sorted(newest(list(records)), key=lambda r: (_suite_and_model(r), order(r)))
    return [list(group) for _, group in itertools.groupby(shown, key=_suite_and_model)]


def order(record: Record) -> tuple[Any, ...]:
    """Sort key: dense first, then by capacity, recompute before other policies."""
    cell = record.cell
    unusual = cell.positions != usual_positions(cell.evicts)
    first = {"dense": 0, "recompute_window": 1, "recompute_sink_window": 1}.get(cell.policy, 2)
    return (
        cell.capacity or 0,
        first,
        cell.policy,
        repr(cell.parameters),
        cell.evicts,
        cell.stored,
        unusual,
        cell.positions,
        cell.seed,
        record.key,
    )


def usual_positions(evicts: str) -> str:
    """The mode that comes first: as public code leaves the keys of a prompt that it cuts, and ranks in an endless stream."""
    return "stream" if evicts == "prompt" else "cache"


def _suite_and_model(record: Record) -> str:
    """Groups records by suite and model."""
    cell = record.cell.as_json()
    return repr([cell["suite"], cell["suite_version"], cell["model"]])


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
    curves = over_steps.body(record.cell.suite, suite) if over_steps.KEPT.fullmatch(record.cell.model.id) else []
    return page([*curves, *_table([r for r in suite if section_key(r) == section_key(record)])])


def unasked(records: Iterable[Record], asked: Collection[tuple[str, int]]) -> list[str | Chart]:
    """The tables of suites that answer no question, as they have no perplexity or right answers: times, memory, attention."""
    groups: dict[str, list[Record]] = {}
    for record in newest(list(records)):
        if _suite(record) not in asked:
            groups.setdefault(section_key(record), []).append(record)
    return [line for group in groups.values() for line in _table(group)]


def _table(records: Iterable[Record]) -> list[str | Chart]:
    """The table of records of one section, with its heading."""
    rows = sorted(records, key=order)
    cell, task = rows[0].cell, task_of(rows[0])
    of_what = f"{md(cell.suite)} v{md(cell.suite_version)}: {md(cell.model.id)}, {md(cell.model.dtype)}.\n"
    return [f"## {md(task.heading(rows[0]))}\n", of_what, *task.body(rows)]


def _suite(record: Record) -> tuple[str, int]:
    return record.cell.suite, record.cell.suite_version
