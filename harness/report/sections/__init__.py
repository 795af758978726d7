"""How records of a task are shown: one module a task, named after it; `generic` shows what has none.

A module has `headline(record)`, the figure of a finished cell in words; `body(records)`, the lines of its section
with its charts, what was asked first; perhaps `heading(record)`, what a section is called; and `AXES`, the options of
the task that vary within a section.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.pairing import question


def _module(record: Record) -> Any:
    """What shows a record's task."""
    name = str(record.cell["task"].get("name", ""))
    known = name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}") is not None
    return importlib.import_module(f"{__name__}.{name if known else 'generic'}")


def headline(record: Record) -> str:
    """The figure of a finished cell, in words."""
    return str(_module(record).headline(record)) if record.status == "ok" else ""


def heading(record: Record) -> str:
    """What a section is called: the task, unless its module says more."""
    own = getattr(_module(record), "heading", None)
    return str(own(record) if own else record.cell["task"].get("name", ""))


def body(records: Sequence[Record]) -> list[str | Chart]:
    """Lines of a section, and its charts."""
    lines: list[str | Chart] = _module(records[0]).body(records)
    return lines


def shared(record: Record) -> str:
    """What the records of one section have in common."""
    axes = _module(record).AXES
    if not axes:
        return question(record)
    cell = record.cell
    task = {k: v for k, v in cell["task"].items() if k not in axes}
    return repr([cell["suite"], cell["suite_version"], cell["model"], task, ""])
