"""What a task declares about its records: their figures, how they are computed again, and what pages and comparisons show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvbench.harness.core import plugins
from kvbench.harness.records import Record
from kvbench.harness.records.cell import Options
from kvbench.harness.records.facts import Data
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report import plain
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, Traces


class TaskReport:
    """The part of a task that needs no model. Everything has a default that shows and compares plain numbers.

    Attributes:
        options: what a suite may say.
        metrics: its figures; each field says how the gate checks it (`records/rules.py`).
        data_facts: what its records tell of what was read.
        trace: suffix of the file of per-token, per-question or per-step figures beside a record; None if it keeps none.
        columns: figures that its table shows; all plain numbers if empty.
        axes: options that vary within one section of the page.
        named_by: options that name its cells in one line of `bench compare`.
        shown_options: options that the sortable page shows; all if None.
        never_pooled_over: options over which right answers are not added up.
        speed_counts: the gate compares how long its evaluation takes.
    """

    options: ClassVar[type[Options]]
    metrics: ClassVar[type[Metrics]] = Metrics
    data_facts: ClassVar[type[Data]] = Data
    trace: ClassVar[str | None] = None
    columns: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[tuple[str, ...]] = ()
    named_by: ClassVar[tuple[str, ...]] = ()
    shown_options: ClassVar[tuple[str, ...] | None] = None
    never_pooled_over: ClassVar[tuple[str, ...]] = ()
    speed_counts: ClassVar[bool] = True

    @classmethod
    def check_figures(cls, options: Any, metrics: Any) -> None:
        """Whether figures agree with what was asked.

        Raises:
            BadRecordError: they don't.
        """

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """Figures by their names, computed again from the file beside the record. What it raises is the file's fault."""
        return {}

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """Figures, with dots in their names, that follow from others of the record."""
        return iter(())

    @classmethod
    def streams(cls, options: Any) -> int:
        """Streams whose caches a cell holds side by side. Everything that counts K/V bytes asks here."""
        return 1

    @classmethod
    def cached_tokens(cls, record: Record) -> tuple[int, int] | None:
        """(streams, tokens of each) that its cache holds at most, the free slot not counted; None where that can't be known."""
        capacity = record.cell.capacity
        return None if capacity is None else (cls.streams(record.cell.task), capacity)

    @classmethod
    def headline(cls, record: Record) -> str:
        """The figure of a finished cell, in words."""
        return plain.headline(record, cls.columns)

    @classmethod
    def heading(cls, record: Record) -> str:
        """What a section of the page is called."""
        return record.cell.task.name

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """The lines of a section, and its charts."""
        return plain.body(records, cls.columns)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Its figures in two records that went well, each with a verdict on the second."""
        return plain.differences(a, b)


class UnknownTask(TaskReport):
    """A task that is not installed: its plain numbers are shown and compared."""


def task_of(record: Record) -> type[TaskReport]:
    """The task of a record, found by its name."""
    found: type[TaskReport] | None = plugins.known_task(record.cell.task.name)
    return UnknownTask if found is None else found
