"""Latency of a decode step in the real loop: with a full cache, and over the stream while the cache fills.

Source: Xiao et al. 2023, arXiv:2309.17453, Figure 10 (per-token decoding latency by cache size).
Differs: cells are measured side by side, interleaved round by round, until the latency of each has a stated precision. The text
is random, then the model's own greedy continuation, because latency does not depend on the text. On a CPU the whole stream is
read. On a GPU only the prompt is read, and random K and V replace the tokens between the prompt and a timed point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import largest, step_figures, timing
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.figure_rules import EXACT, MACHINE, TIME, Checked, Unchecked
from kvbench.harness.records.metrics import Metrics, StepMetrics
from kvbench.harness.records.types import Amount, BadRecordError, Count, Duration, Number, Part, Positive
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.compare import speed_up
from kvbench.harness.report.markdown import digits, in_bytes, md, measured_table, number, policy_table, rounded
from kvbench.harness.report.rows import kv_cells
from kvbench.harness.report.sections import by_machine
from kvbench.harness.report.task_charts import over_capacity
from kvbench.harness.tasks.task import MAX_TOKENS, Job, Options, RandomTokens, Task, Tokenizer, Workload

_LARGEST_CACHE = 2**28  # bytes of a processor's cache, which can deliver weights and K/V faster than memory
# Smallest plausible shares of the roofline's time: rates vary by some percent between measurements, and a processor's cache is up
# to five times as fast as memory.
_LEAST_FROM_CACHE, _LEAST = 0.2, 0.8
FIRST_POINT = 256  # tokens before the first point; each further point comes after twice as many
PROMPTS = 7  # prompts read to time the first token; the first prompt warms up
WARM_UP_STEPS = 3
MAX_ROUND_MS = 100.0  # largest duration of a cell's steps in a round, which are at least one
BOOKKEEPING_STEPS = 16
_STEP_COUNT = Unchecked("depends on how many steps fit into a round")
_IF_BOUNDED = Checked(scope="bounded")


class LatencyOptions(Options):
    """Options of the latency task."""

    shown = ("tokens", "batch", "prompt")

    name: Literal["latency"] = "latency"
    tokens: int = Field(4096, ge=2, le=MAX_TOKENS, description="length of the stream; the steady state is measured at its end")
    prompt: int = Field(256, ge=1, description="length of the prompt; the first token of its answer is timed")
    batch: int = Field(1, ge=1, description="number of streams side by side")
    steps: int = Field(16, ge=1, description="largest number of decode steps of a cell in one round")
    rounds: int = Field(8, ge=6, description="rounds in a sitting; each round times all cells, in random order")
    sittings: int = Field(3, ge=2, description="smallest number of sittings; each starts with fresh caches")
    most_sittings: int = Field(8, ge=2, description="largest number of sittings; a cell that has not settled by then is flagged")
    precision: float = Field(
        0.02, gt=0, lt=1, description="a cell is settled when the relative error of its median step is at most this"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.prompt > self.tokens:
            raise ValueError(f"prompt {self.prompt} is longer than the stream of {self.tokens} tokens")
        if self.sittings > self.most_sittings:
            raise ValueError(f"sittings {self.sittings} is more than most_sittings {self.most_sittings}")
        return self


class LatencyPoint(Part):
    """Time of a step at one point of the stream."""

    position: Annotated[Positive, EXACT] = Field(description="tokens read before")
    step_ms: Annotated[Duration, TIME] = Field(description="median of the rounds' medians")
    error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of step_ms")
    steps: Annotated[Count, _STEP_COUNT] = Field(0, description="number of timed steps")
    used_slots: Annotated[Amount, _IF_BOUNDED] = Field(description="slots that hold a token")
    attended_slots: Annotated[Amount, _IF_BOUNDED] = Field(description="slots that the step attended over")


class DeviceRates(Part):
    """Rates measured on the device, per second."""

    bandwidth: Annotated[Duration, MACHINE] = Field(description="bytes copied")
    multiply_rate: Annotated[Duration, MACHINE] = Field(description="operations of a matrix product")


class Roofline(Part):
    """Shortest possible time of a step."""

    bytes: Annotated[Amount, _IF_BOUNDED] = Field(description="bytes that must move")
    operations: Annotated[Amount, _IF_BOUNDED] = Field(description="operations that must be done")
    ms: Annotated[Duration, MACHINE] = Field(description="milliseconds: the longer time of the two")


class LatencyMetrics(StepMetrics):
    """Figures of the latency task."""

    settled: Annotated[bool, TIME] = Field(False, description="whether the error is within the option `precision`")
    sittings: Annotated[Positive, TIME] = Field(description="number of sittings")
    percentiles_ms: Annotated[dict[str, Amount], TIME] = Field(description="percentiles of all steps")
    largest_ms: Annotated[Amount | None, TIME] = Field(None, description="longest step of a sitting, the median of the sittings")
    steps: Annotated[Count, _STEP_COUNT] = Field(0, description="number of steps timed at the end of the stream")
    spread_ms: Annotated[list[Amount], TIME] = Field(default_factory=list, description="smallest and largest median of a round")
    tokens_per_second: Annotated[Amount, TIME] = Field(description="tokens per second of all streams together")
    first_token_error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of first_token_ms")
    position: Annotated[Count, EXACT] = Field(0, description="tokens read before the last steps")
    curve: list[LatencyPoint] = Field(min_length=1, description="step times over the stream")
    bookkeeping_share: Annotated[Number, TIME] = Field(description="share of a step spent on statistics, scoring and eviction")
    roofline: Roofline | None = Field(None, description="the shortest time a step can take")
    over_roofline: Annotated[Amount, TIME] = Field(description="step_ms as a multiple of the roofline")
    device: DeviceRates = Field(description="rates measured on the device")

    def headline(self) -> str:
        """Return the milliseconds per token."""
        return f"{digits(self.step_ms, 3)} ms/token ± {self.error:.0%}"

    def check(self, options: LatencyOptions) -> None:
        """Check that the record has a time for each round of each sitting."""
        if len(self.rounds_ms) != self.sittings * options.rounds:
            raise BadRecordError(("metrics", "rounds_ms"), "must have one time per round of each sitting")

    def derived(self, cell: CellSpec) -> Iterator[tuple[str, Any]]:
        """Yield the figures that follow from the roofline; none for older records without a roofline."""
        if self.roofline is not None:
            bound, rates = self.roofline, self.device
            yield "roofline.ms", 1e3 * max(bound.bytes / rates.bandwidth, bound.operations / rates.multiply_rate)
            yield "over_roofline", self.step_ms / bound.ms

    def impossible(self) -> Iterator[str]:
        """Yield a sentence if a step is faster than its bytes and operations allow at the device's measured rates."""
        if self.roofline is None:
            return
        moved, done, rates = self.roofline.bytes, self.roofline.operations, self.device
        share = _LEAST_FROM_CACHE if moved <= _LARGEST_CACHE else _LEAST
        least = 1e3 * max(share * moved / rates.bandwidth, _LEAST * done / rates.multiply_rate)
        if self.step_ms < least:
            yield (
                f"step_ms is {digits(self.step_ms, 3)}, but {moved:,.0f} bytes and {done:,.0f} operations take "
                f"{digits(least, 3)} ms or more on this device"
            )


@dataclass(frozen=True, kw_only=True)
class _Rounds(Workload):
    """Steps timed in rounds of bounded length."""

    options: LatencyOptions

    def seconds(self, token: float, step: float) -> float:
        """Estimate the seconds of prompts, a stream in each sitting, and rounds at each point and in each sitting."""
        options = self.options
        points = options.sittings + max(0, (options.tokens // FIRST_POINT).bit_length())
        steps = max(1, min(options.steps, int(MAX_ROUND_MS / max(1e3 * step, 1e-6)))) * options.rounds + WARM_UP_STEPS
        read = (PROMPTS + options.sittings) * options.prompt + options.sittings * options.tokens
        return read * options.batch * token + (points * steps + BOOKKEEPING_STEPS) * step


class Latency(Task):
    """Milliseconds of a decode step over a stream, also as a multiple of the roofline."""

    options = LatencyOptions
    metrics = LatencyMetrics
    trace = ".steps.npy"
    measures = "time"

    @staticmethod
    def data(options: LatencyOptions, tokenizer: Tokenizer, directory: Path | None) -> RandomTokens:
        """Return random tokens."""
        return RandomTokens(options.tokens)

    @classmethod
    def workload(cls, options: LatencyOptions) -> Workload:
        """Return streams side by side, and rounds of steps in each sitting and at about five points of the stream."""
        return _Rounds(
            sequences=options.batch,
            length=options.tokens,
            side_by_side=options.batch,
            kv_streams=options.batch,
            steps=options.rounds * options.steps * (options.sittings + 5),
            options=options,
        )

    @classmethod
    def run_together(cls, options: LatencyOptions, jobs: Sequence[Job]) -> Iterator[tuple[int, Metrics | Exception]]:
        """Measure all cells interleaved, in groups whose caches fit into memory. Yield a group's results when it is finished."""
        from kvbench.harness.tasks.latency.time_cells import measure

        return measure(options, jobs)

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute the figures of the timed steps at the end of the stream."""
        steps, options = np.load(trace).astype(np.float64), record.cell.task_options(LatencyOptions)
        figures = step_figures(steps, options.batch) | {"step_ms": float(np.median(np.median(steps, 1)))}
        metrics = record.measured(LatencyMetrics)
        if metrics is not None:
            sittings = [list(rounds) for rounds in np.split(steps, metrics.sittings)]
            figures["error"] = timing(sittings)[1]
            figures |= {} if metrics.largest_ms is None else {"largest_ms": largest(sittings)}
            figures["settled"] = metrics.error <= options.precision
        return figures

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return, per machine, a table of the steady state, its chart over the capacity, and the curve over the stream."""
        task = records[0].cell.task_options(LatencyOptions)
        about = (
            f"One decode step, {task.batch} stream{'s' if task.batch > 1 else ''}, after {number(task.tokens)} tokens. "
            "ms/token, or TPOT, is the median with half its 95 % interval; TTFT is the time to the first token of an answer to "
            f"a prompt of {task.prompt:,} tokens. Speed-ups are medians over the rounds that timed both cells, "
            "with their interval: over dense, which caches the whole stream, and over recomputing a window of the same capacity. "
            "Bookkeeping is the share of a step spent on statistics, scoring and eviction. The roofline is the shortest time "
            "that the bytes or operations of a step can take at this device's rates, measured at the start. "
            "Slots: in use / attended.\n"
        )
        lines: list[str | Chart] = [about]
        for machine, part in by_machine(records):
            lines += [f"On {md(machine)}:\n"] if machine else []
            lines += measured_table(part, LatencyMetrics, partial(_row, records=part))
            lines += [*over_capacity(part, machine), *_curve(part), *_rates(part)]
        return lines


def _row(record: Record, m: LatencyMetrics, records: Sequence[Record]) -> dict[str, str]:
    """Return the cells of a record's row, by heading. records: all records of the machine."""
    dense = [r for r in records if r.cell.is_dense]
    recompute = [r for r in records if r.cell.policy == "recompute_window" and r.cell.capacity == record.cell.capacity]
    last, tails = m.curve[-1], m.percentiles_ms
    return {
        "ms/token (TPOT)": f"{digits(m.step_ms, 3)} ± {m.error:.0%}",
        **{q: digits(tails.get(q), 3) for q in ("p90", "p99")},
        "longest": digits(m.largest_ms, 3),
        "tokens/s": rounded(m.tokens_per_second),
        "first token ms (TTFT)": f"{digits(m.first_token_ms, 3)} ± {m.first_token_error:.0%}",
        "speed-up over dense": speed_up(record, dense),
        "over recompute": speed_up(record, recompute),
        "bookkeeping": f"{m.bookkeeping_share:.0%}" if m.kv_bytes else "",
        "× roofline": f"{m.over_roofline:.1f}",
        "slots": f"{last.used_slots:,.0f} / {last.attended_slots:,.0f}",
        **kv_cells(record, records),
        "state": in_bytes(m.state_bytes),
    }


def _curve(records: Sequence[Record]) -> list[str]:
    """Return a table of milliseconds per token over the stream."""
    curves = [(r, m.curve) for r in records if (m := r.measured(LatencyMetrics))]
    rows = [(r, {p.position: f"{digits(p.step_ms, 3)} ± {p.error:.0%}" for p in curve}) for r, curve in curves]
    about = "ms/token over the stream, while caches fill and afterwards:\n"
    return [about, *policy_table(rows, records, "after {:,}".format)] if rows else []


def _rates(records: Sequence[Record]) -> list[str]:
    """Return a line with the rates measured on the device."""
    rates = [m.device for r in records if (m := r.measured(LatencyMetrics))]
    texts = dict.fromkeys(f"{x.bandwidth / 1e9:,.1f} GB/s, {x.multiply_rate / 1e12:,.2f} TFLOP/s" for x in rates)
    return [f"Device rates, measured at the start: {md('; '.join(texts))}.\n"] if texts else []
