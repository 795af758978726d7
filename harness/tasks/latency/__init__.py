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
from kvbench.harness.records.aggregates import largest, step_figures, timing
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.types import BadRecordError
from kvbench.harness.report import compare
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.compare import speed_up
from kvbench.harness.report.markdown import cache_bytes, count, in_bytes, label, md, status, table
from kvbench.harness.report.sections import by_machine
from kvbench.harness.report.task import Difference, Traces
from kvbench.harness.report.task_charts import over_capacity
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
            sittings = [list(rounds) for rounds in np.split(steps, metrics.sittings)]
            figures["error"] = timing(sittings)[1]
            figures |= {} if metrics.largest_ms is None else {"largest_ms": largest(sittings)}
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
        task = records[0].cell.task_options(LatencyOptions)
        about = (
            f"One decode step, {task.batch} stream{'s' if task.batch > 1 else ''}, after {count(task.tokens)} tokens. "
            "ms/token is the median with half its 95 % interval. Speed-ups are medians over the rounds that timed both cells, "
            "with their interval: over dense, which caches the whole stream, and over recomputing a window of the same capacity. "
            "Bookkeeping is the share of a step spent on statistics, scoring and eviction. The roofline is the shortest time "
            "that the bytes or operations of a step can take at this device's rates, measured at the start. "
            "Slots: in use / attended.\n"
        )
        head = [
            "policy", "capacity", "ms/token", "p90", "p99", "longest", "tokens/s", "first token ms", "speed-up over dense",
            "over recompute", "bookkeeping", "× roofline", "slots", "K/V", "state", "status",
        ]  # fmt: skip
        lines: list[str | Chart] = [about]
        for machine, part in by_machine(records):
            lines += [f"On {md(machine)}:\n"] if machine else []
            lines += table(head, [_row(r, part) for r in part], "lrrrrrrrrrrrrrrl")
            lines += [*over_capacity(part, machine), *_curve(part), *_rates(part)]
        return lines

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Step times, paired by round if both records were timed together."""
        return compare.step_time(a, b)


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    name, m = [label(record), count(record.cell.capacity)], record.measured(LatencyMetrics)
    if m is None:
        return [*name, *[""] * 13, status(record)]
    dense = [r for r in records if r.cell.is_dense]
    recompute = [r for r in records if r.cell.policy == "recompute_window" and r.cell.capacity == record.cell.capacity]
    last, tails = m.curve[-1], m.percentiles_ms
    return [
        *name, f"{m.step_ms:.3g} ± {m.error:.0%}", *(f"{tails[q]:.3g}" if q in tails else "" for q in ("p90", "p99")),
        "" if m.largest_ms is None else f"{m.largest_ms:.3g}",
        f"{m.tokens_per_second:,.0f}", f"{m.first_token_ms:.3g} ± {m.first_token_error:.0%}",
        speed_up(record, dense), speed_up(record, recompute), f"{m.bookkeeping_share:.0%}" if m.kv_bytes else "",
        f"{m.over_roofline:.1f}", f"{last.used_slots:,.0f} / {last.attended_slots:,.0f}",
        cache_bytes(m.kv_bytes), in_bytes(m.state_bytes), status(record),
    ]  # fmt: skip


def _curve(records: Sequence[Record]) -> list[str]:
    """Milliseconds per token over the stream."""
    curves = [(r, m.curve) for r in records if (m := r.measured(LatencyMetrics))]
    points = sorted({point.position for _, curve in curves for point in curve})
    rows = []
    for record, curve in curves:
        steps = {point.position: point for point in curve}
        cells = (f"{steps[p].step_ms:.3g} ± {steps[p].error:.0%}" if p in steps else "" for p in points)
        rows.append([label(record), count(record.cell.capacity), *cells])
    head = ["policy", "capacity", *(f"after {p:,}" for p in points)]
    return (
        ["ms/token over the stream, while caches fill and afterwards:\n", *table(head, rows, "lr" + "r" * len(points))]
        if rows
        else []
    )


def _rates(records: Sequence[Record]) -> list[str]:
    """Rates measured on the device."""
    rates = [m.device for r in records if (m := r.measured(LatencyMetrics))]
    texts = dict.fromkeys(f"{x.bandwidth / 1e9:,.1f} GB/s, {x.multiply_rate / 1e12:,.2f} TFLOP/s" for x in rates)
    return [f"Device rates, measured at the start: {md('; '.join(texts))}.\n"] if texts else []
