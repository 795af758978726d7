"""Memory: what a cache says it takes, what it is found to take, and the peak over a stream that should not show.

On a CPU a cell runs in a process of its own, whose peak the system keeps (Linux: VmHWM, reset once the model is loaded);
on CUDA the allocator's statistics tell. Whatever disagrees is flagged in the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, Traces
from kvbench.harness.report.markdown import in_bytes
from kvbench.harness.report.recomputed import kv_bytes
from kvbench.harness.tasks.memory import page
from kvbench.harness.tasks.memory.schema import MemoryMetrics, MemoryOptions
from kvbench.harness.tasks.task import Job, Options, RandomTokens, Task, Tokenizer


class Memory(Task):
    """Bytes of the cache, as reported and as found, and the peak over the stream."""

    options: ClassVar[type[Options]] = MemoryOptions
    metrics: ClassVar[type[Metrics]] = MemoryMetrics
    shown_options: ClassVar[tuple[str, ...] | None] = ("tokens", "batch")
    speed_counts: ClassVar[bool] = False
    of_device: ClassVar[bool] = True
    apart: ClassVar[bool] = True

    @staticmethod
    def data(options: MemoryOptions, tokenizer: Tokenizer, directory: Path | None) -> RandomTokens:
        """Nothing is read but random tokens."""
        return RandomTokens(options.tokens)

    @staticmethod
    def total(options: MemoryOptions) -> int:
        """The stream."""
        return options.tokens * options.batch

    @classmethod
    def streams(cls, options: MemoryOptions) -> int:
        """A batch."""
        return options.batch

    @classmethod
    def windows(cls, options: MemoryOptions) -> float:
        """One a block."""
        return options.batch * options.tokens / 256

    @staticmethod
    def run(options: MemoryOptions, job: Job) -> MemoryMetrics:
        """Read the stream, and look at the memory on the way."""
        from kvbench.harness.tasks.memory.measure import measure

        return measure(options, job)

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """The peak and its growth, from the curve; the bytes of K and V."""
        metrics, capacity = record.measured(MemoryMetrics), record.cell.capacity or 0
        assert metrics is not None
        filled = next((point for point in metrics.curve if point.position > capacity), metrics.curve[-1])
        yield "peak_bytes", metrics.curve[-1].peak_bytes
        yield "growth_bytes", metrics.curve[-1].peak_bytes - filled.peak_bytes
        expected = kv_bytes(record)
        if expected is not None:
            yield "expected_kv_bytes", expected

    @classmethod
    def cached_tokens(cls, record: Record) -> tuple[int, int] | None:
        """The whole stream, where the cache has no bound."""
        options = record.cell.task_options(MemoryOptions)
        return super().cached_tokens(record) or (options.batch, options.tokens)

    @classmethod
    def headline(cls, record: Record) -> str:
        """The peak."""
        metrics = record.measured(MemoryMetrics)
        return "" if metrics is None else f"peak {in_bytes(metrics.peak_bytes)} over weights"

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """What is reported beside what was found, and the curve over the stream."""
        return page.body(records)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Peaks are for the gate, which knows what varies; the bytes of the cache are compared for every task."""
        return []
