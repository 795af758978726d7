"""Declarations of a task about its records: figures, their recomputation, and contents of pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, ClassVar, Literal

from kvbench.harness.core import plugins
from kvbench.harness.core.workload import Workload
from kvbench.harness.records import Record
from kvbench.harness.records.cell import Options
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.run_facts import DataFacts
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import md, number, policy_table, status, task_line

Measures = Literal["quality", "time", "memory", "attention"]
OF_MACHINE = ("time", "memory")  # figures that depend on device and threads, which are then part of the record's key


def plain(record: Record) -> dict[str, Any]:
    """Return the figures that are plain numbers."""
    return {k: v for k, v in record.metrics.as_json().items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def titles_of(record: Record) -> dict[str, str]:
    """Return the titles of the figures that have one."""
    fields = task_of(record).metrics.model_fields
    return {name: field.title for name, field in fields.items() if field.title}


class TaskReport:
    """Part of a task that needs no model. The defaults show plain numbers.

    Attributes:
        options: class of the options that a suite may set.
        metrics: class of the figures; each field declares its rule for the gate (`records/figure_rules.py`).
        data_facts: class of the facts about the data in records.
        trace: suffix of the file with per-token, per-question or per-step figures; None if the task writes no trace.
        measures: kind of figures, which decides how cells run. Figures of "quality" depend on no machine. Cells of one model that
            measure "time" are interleaved and finish together. On a CPU, each cell that measures "memory" has a process of its
            own. A task that measures "attention" reads the model's internals, also for models that the decode loop can't drive.
            The gate compares the speed of evaluations of "quality" only.
    """

    options: ClassVar[type[Options]]
    metrics: ClassVar[type[Metrics]] = Metrics
    data_facts: ClassVar[type[DataFacts]] = DataFacts
    trace: ClassVar[str | None] = None
    measures: ClassVar[Measures] = "quality"

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute figures from the trace, by name. An exception is reported as a fault of the file."""
        return {}

    @classmethod
    def workload(cls, options: Any) -> Workload:
        """Return the sizes of a cell's work. Pages need only `kv_streams`."""
        return Workload(sequences=1, length=0)

    @classmethod
    def cached_tokens(cls, record: Record) -> int | None:
        """Return the largest number of a stream's tokens in the cache, without the free slot; None if unknown."""
        return record.cell.most_kept

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return the lines and charts of a section: a row per record and a column per plain number.

        If any figure has a title, only figures with a title are shown.
        """
        titles = titles_of(records[0])
        names = list(titles or dict.fromkeys(name for record in records for name in plain(record)))
        heads = {name: md(titles.get(name, name)) for name in names} | {"status": "status"}
        rows = [(r, {name: number(plain(r).get(name)) for name in names} | {"status": status(r)}) for r in records]
        return [task_line(records[0]), *policy_table(rows, records, heads)]


def task_of(record: Record) -> type[TaskReport]:
    """Return the task of a record, by its name; `TaskReport` itself for a task that is not installed."""
    task: type[TaskReport] | None = plugins.known_task(record.cell.task.name)
    return task or TaskReport


def kv_title(records: Iterable[Record]) -> str:
    """Return the title of a column with the bytes of K and V of records: the streams whose bytes are summed, if several."""
    streams = {task_of(record).workload(record.cell.task).kv_streams for record in records}
    if max(streams, default=1) == 1:
        return "K/V"
    return f"K/V of {streams.pop():,} streams" if len(streams) == 1 else "K/V of all streams"
