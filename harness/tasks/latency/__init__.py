"""Latency of a decode step in the real loop: with a full cache, and over the stream while the cache fills.

Source: the figure of Xiao et al. 2023, arXiv:2309.17453, Figure 10 (per-token decoding latency by cache size).
Differs: cells are measured side by side, interleaved round by round, until each is known to a stated precision. The text is
random, then the model's own greedy continuation, because latency does not depend on it. On a GPU the prompt is read, but the
stream between it and a timed point is not: random K and V stand for it in the cache. On a CPU it is read.
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
    """Milliseconds of a decode step over a stream, also as a multiple of the roofline."""

    options: ClassVar[type[Options]] = LatencyOptions
    metrics: ClassVar[type[Metrics]] = LatencyMetrics
    trace: ClassVar[str | None] = ".steps.npy"
    shown_options: ClassVar[tuple[str, ...] | None] = ("tokens", "batch", "prompt")
    speed_counts: ClassVar[bool] = False
    of_device: ClassVar[bool] = True
    times_steps: ClassVar[bool] = True
    together: ClassVar[bool] = True

    @staticmethod
    def data(options: LatencyOptions, tokenizer: Tokenizer, directory: Path | None) -> RandomTokens:
        """Random tokens."""
        return RandomTokens(options.tokens)

    @staticmethod
    def total(options: LatencyOptions) -> int:
        """The tokens of all streams."""
        return options.tokens * options.batch

    @classmethod
    def streams(cls, options: LatencyOptions) -> int:
        """The batch size."""
        return options.batch

    @classmethod
    def windows(cls, options: LatencyOptions) -> float:
        """One per step, in all sittings and at about five points of the stream."""
        return options.batch * options.rounds * options.steps * (options.sittings + 5)

    @classmethod
    def run_together(cls, options: LatencyOptions, jobs: Sequence[Job]) -> Iterator[tuple[int, Metrics | Exception]]:
        """Measure all cells interleaved, in groups whose caches fit into memory. Yields a group's results when it is finished."""
        from kvbench.harness.tasks.latency.measure import measure

        return measure(options, jobs)

    @classmethod
    def check_figures(cls, options: LatencyOptions, metrics: LatencyMetrics) -> None:
        """Check that there is a time for each round of each sitting."""
        if len(metrics.rounds_ms) != metrics.sittings * options.rounds:
            raise BadRecordError(("metrics", "rounds_ms"), "must have one time per round of each sitting")

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """All figures of the timed steps at the end of the stream."""
        steps, options = np.load(trace, mmap_mode="r").astype(np.float64), record.cell.task_options(LatencyOptions)
        figures = step_figures(steps, options.batch) | {"step_ms": float(np.median(np.median(steps, 1)))}
        metrics = record.measured(LatencyMetrics)
        if metrics is not None:
            figures["error"] = timing([list(rounds) for rounds in np.split(steps, metrics.sittings)])[1]
            figures["settled"] = metrics.error <= options.precision
        return figures

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """What follows from the roofline, which older records lack."""
        metrics = record.measured(LatencyMetrics)
        if metrics is None or metrics.roofline is None:
            return
        bound, rates = metrics.roofline, metrics.device
        yield "roofline.ms", 1e3 * max(bound.bytes / rates.bandwidth, bound.operations / rates.multiply_rate)
        yield "over_roofline", metrics.step_ms / bound.ms

    @classmethod
    def headline(cls, record: Record) -> str:
        """Milliseconds per token."""
        metrics = record.measured(LatencyMetrics)
        return "" if metrics is None else f"{metrics.step_ms:.3g} ms/token ± {metrics.error:.0%}"

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """For each machine: the steady state, a chart of it over the capacity, and the curve over the stream."""
        return page.body(records)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Step times, paired by round if both records were timed together."""
        return compare.step_time(a, b)
