"""Memory: bytes that a cache reports, bytes that it allocates, and the peak over a stream.

On a CPU a cell runs in its own process, and the operating system records the peak (Linux: VmHWM, reset once the model is
loaded). On CUDA the allocator records the peak. Bytes that disagree are flagged, as is a peak that rises after the cache is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kvbench.harness.records import Record
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.figure_rules import BYTES, EXACT, TIME, Unchecked
from kvbench.harness.records.metrics import PeakMetrics
from kvbench.harness.records.types import Amount, Count, Part, Positive, Whole
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import digits, in_bytes, md, measured_table, policy_table, task_line
from kvbench.harness.report.task_report import kv_title
from kvbench.harness.tasks.task import MAX_TOKENS, Job, Options, RandomTokens, Task, Tokenizer, Workload


class MemoryOptions(Options):
    """Options of the memory task."""

    shown = ("tokens", "batch")

    name: Literal["memory"] = "memory"
    tokens: int = Field(16384, ge=16, le=MAX_TOKENS, description="length of the stream")
    points: int = Field(16, ge=4, le=10_000, description="number of equal parts of the stream; memory is measured after each")
    batch: int = Field(1, ge=1, description="number of streams side by side")


class MemoryPoint(Part):
    """Memory at one point of the stream."""

    position: Annotated[Positive, EXACT] = Field(description="tokens read")
    peak_bytes: Annotated[Whole, Unchecked("the gate checks the final peak")] = Field(description="largest use so far")
    token_ms: Annotated[Amount, TIME] = Field(description="mean milliseconds per token in the part of the stream that ends here")


class MemoryMetrics(PeakMetrics):
    """Figures of the memory task."""

    expected_kv_bytes: Annotated[Count | None, BYTES] = Field(None, description="K and V by the shapes of the model's layers")
    weight_bytes: Annotated[Count, BYTES] = Field(description="bytes of the model's weights")
    curve: list[MemoryPoint] = Field(min_length=1, description="memory over the stream")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes of K and V, as reported")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics, as reported")

    def headline(self) -> str:
        """Return the peak."""
        return f"peak {in_bytes(self.peak_bytes)} over weights"

    def derived(self, cell: CellSpec) -> Iterator[tuple[str, Any]]:
        """Yield the peak and its growth, computed from the curve."""
        full = next((point for point in self.curve if point.position > (cell.capacity or 0)), self.curve[-1])
        yield "peak_bytes", self.curve[-1].peak_bytes
        yield "growth_bytes", self.curve[-1].peak_bytes - full.peak_bytes


class Memory(Task):
    """Bytes that the cache reports and allocates, and the peak over the stream."""

    options = MemoryOptions
    metrics = MemoryMetrics
    measures = "memory"

    @staticmethod
    def data(options: MemoryOptions, tokenizer: Tokenizer, directory: Path | None) -> RandomTokens:
        """Return random tokens."""
        return RandomTokens(options.tokens)

    @classmethod
    def workload(cls, options: MemoryOptions) -> Workload:
        """Return streams side by side. A window is recomputed once per block of 256 tokens."""
        streams = options.batch
        return Workload(
            sequences=streams,
            length=options.tokens,
            side_by_side=streams,
            kv_streams=streams,
            windows=streams * options.tokens / 256,
        )

    @staticmethod
    def run(options: MemoryOptions, job: Job) -> MemoryMetrics:
        """Read the stream, and measure memory at several points."""
        from kvbench.harness.tasks.memory.meter_stream import measure

        return measure(options, job)

    @classmethod
    def cached_tokens(cls, record: Record) -> int | None:
        """Return the capacity, or the length of the stream if the cache is unbounded."""
        return super().cached_tokens(record) or record.cell.task_options(MemoryOptions).tokens

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return tables of reported and allocated bytes, and of the curve over the stream."""
        measured = [(r, m) for r in records if (m := r.measured(MemoryMetrics))]
        how = "; ".join(dict.fromkeys(m.how for _, m in measured))
        about = (
            f"{task_line(records[0])}K/V and state are the bytes that the cache reports; allocated is measured, and must agree. "
            "The peak is above the level with the model loaded, and includes the activations of a block. "
            f"Growth is the rise of the peak after the cache was full. Measured with {md(how)}.\n"
        )
        return [about, *measured_table(records, MemoryMetrics, partial(_row, kv=kv_title(records))), *_curve(measured)]


_SHOWN_POINTS = 9


def _curve(measured: Sequence[tuple[Record, MemoryMetrics]]) -> list[str]:
    """Return tables of the peak over the stream, and of the time per token in each part of the stream."""
    if not measured:
        return []
    points = [point.position for point in measured[0][1].curve]
    shown = sorted({points[round(i * (len(points) - 1) / (_SHOWN_POINTS - 1))] for i in range(_SHOWN_POINTS)})
    curves = [(record, [p for p in metrics.curve if p.position in shown]) for record, metrics in measured]
    records = [record for record, _ in measured]
    peaks = [(record, {f"peak at {p.position:,}": in_bytes(p.peak_bytes) for p in curve}) for record, curve in curves]
    times = [(record, {f"ms/token at {p.position:,}": digits(p.token_ms, 3) for p in curve}) for record, curve in curves]
    about = "Peak so far, and mean time per token since the previous point, over the stream:\n"
    return [about, *policy_table(peaks, records), *policy_table(times, records)]


def _row(_: Record, m: MemoryMetrics, kv: str) -> dict[str, str]:
    """Return the cells of a record's row, by heading. kv: heading of the bytes of K and V."""
    sizes = {kv: m.kv_bytes, "state": m.state_bytes, "allocated": m.allocated_bytes}
    sizes |= {"peak": m.peak_bytes, "growth": m.growth_bytes, "weights": m.weight_bytes}
    return {name: in_bytes(size) for name, size in sizes.items()}
