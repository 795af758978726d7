"""Latency of a decode step: the real loop, its cache full, and the curve over the stream while it fills.

Source: the figure of Xiao et al. 2023, arXiv:2309.17453, Figure 10 (per-token decoding latency by cache size).
Differs: cells are measured side by side, interleaved round by round, until each is known to a stated precision; what is
read is random and then the model's own greedy continuation, because latency does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import step_figures, timing
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.types import BadRecordError
from kvbench.harness.report import compare
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, Traces
from kvbench.harness.tasks.latency import page
from kvbench.harness.tasks.latency.schema import LatencyMetrics, LatencyOptions
from kvbench.harness.tasks.task import Job, Options, RandomTokens, Task, Tokenizer


class Latency(Task):
    """Milliseconds of a decode step over a stream, and how far from what the memory allows."""

    options: ClassVar[type[Options]] = LatencyOptions
    metrics: ClassVar[type[Metrics]] = LatencyMetrics
    trace: ClassVar[str | None] = ".steps.npy"
    shown_options: ClassVar[tuple[str, ...] | None] = ("tokens", "batch", "prompt")
    speed_counts: ClassVar[bool] = False
    of_device: ClassVar[bool] = True
    together: ClassVar[bool] = True

    @staticmethod
    def data(options: LatencyOptions, tokenizer: Tokenizer, directory: Path | None) -> RandomTokens:
        """Nothing is read but random tokens."""
        return RandomTokens(options.tokens)

    @staticmethod
    def total(options: LatencyOptions) -> int:
        """The stream."""
        return options.tokens * options.batch

    @classmethod
    def streams(cls, options: LatencyOptions) -> int:
        """A batch."""
        return options.batch

    @classmethod
    def windows(cls, options: LatencyOptions) -> float:
        """One a step: of every sitting, and of about five points of the stream."""
        return options.batch * options.rounds * options.steps * (options.sittings + 5)

    @classmethod
    def run_together(cls, options: LatencyOptions, jobs: Sequence[Job]) -> list[Metrics | Exception]:
        """Measure all cells interleaved, as many at once as their caches fit into memory."""
        from kvbench.harness.tasks.latency.measure import measure

        return measure(options, jobs)

    @classmethod
    def check_figures(cls, options: LatencyOptions, metrics: LatencyMetrics) -> None:
        """Every round of every sitting has its time."""
        if len(metrics.rounds_ms) != metrics.sittings * options.rounds:
            raise BadRecordError(("metrics", "rounds_ms"), "one a round of every sitting")

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """All that is told of the timed steps at the end of the stream."""
        steps, options = np.load(trace, mmap_mode="r").astype(np.float64), record.cell.task_options(LatencyOptions)
        figures = step_figures(steps, options.batch) | {"step_ms": float(np.median(np.median(steps, 1)))}
        metrics = record.measured(LatencyMetrics)
        if metrics is not None:
            figures["error"] = timing([list(rounds) for rounds in np.split(steps, metrics.sittings)])[1]
            figures["settled"] = metrics.error <= options.precision
        return figures

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """What follows from the roofline; older records have none."""
        metrics = record.measured(LatencyMetrics)
        if metrics is None or metrics.roofline is None:
            return
        bound, rates = metrics.roofline, metrics.device
        yield "roofline.ms", 1e3 * max(bound.bytes / rates.bandwidth, bound.operations / rates.multiply_rate)
        yield "over_roofline", metrics.step_ms / bound.ms

    @classmethod
    def headline(cls, record: Record) -> str:
        """Milliseconds a token."""
        metrics = record.measured(LatencyMetrics)
        return "" if metrics is None else f"{metrics.step_ms:.3g} ms/token ± {metrics.error:.0%}"

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Machine by machine the steady state, a picture of it over the capacity, then the curve over the stream."""
        return page.body(records)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Of a step, round by round where the two were timed in turn."""
        return compare.step_time(a, b)
