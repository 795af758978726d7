"""Checks of figures that a busy machine can disturb in the gate: step times, speed of evaluation, peak memory.

Times are compared as ratios: a policy's step to dense's, dense's step and the first token to the model's own forward pass, the
speed of an evaluation to the calibration step of the same run. A step's ratio must lie in the noise band that a baseline learnt
from several runs. Cells with worse or better ratios are measured again, and the majority of three measurements decides. A better
ratio does not pass, because a clock that misses half of the work gives a better ratio, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import PeakMetrics, StepMetrics
from kvbench.harness.report.compare import setup_changes
from kvbench.harness.report.gate_figures import Pair, Result, State
from kvbench.harness.report.task_report import task_of

CHECKS = ("latency", "prompt", "speed", "memory")
# Half-widths of bands are in log ratio.
_HALF_WIDTH_SDS = 4
_MIN_HALF_WIDTH = 0.10  # allows for a machine's speed on different days
_MIN_HALF_WIDTH_DENSE = 0.40  # dense's yardstick runs other code; a regression to twice the time must still be detected
_HALF_WIDTH_OF_ONE_RUN = 0.30  # one run has no spread
# Largest allowed ratios of a time to the baseline's, each divided by its yardstick.
MAX_EVALUATION_SLOWDOWN = 4.0
MAX_PROMPT_SLOWDOWN = 3.0
# Interruptions by other work do not get longer with an evaluation, so a second is allowed in addition to the ratio. Unchanged
# cells of less than a second took up to 4.1 times as long on a busy machine.
INTERRUPTION_SECONDS = 1.0
# Allowed bytes: (factor on the baseline's bytes, bytes more, bytes fewer); the bytes allow for varying numbers of pages.
_BYTES_ALLOWANCE = {
    "peak_bytes": (1.5, 2**20, 2**19),
    "growth_bytes": (1.5, 2**20, math.inf),
    "allocated_bytes": (1.02, 2**16, 2**16),
}


class Band(BaseModel):
    """Range of the ratio of a cell's step time to its yardstick's, and the median ratio, in runs of unchanged code."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ratio: float = Field(gt=0, allow_inf_nan=False)
    low: float = Field(gt=0, allow_inf_nan=False)
    high: float = Field(gt=0, allow_inf_nan=False)
    runs: int = Field(ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.ratio <= self.high:
            raise ValueError(f"a band of {self.ratio:g} from {self.low:g} to {self.high:g}")
        return self


def learn_bands(runs: Sequence[Sequence[Record]]) -> dict[str, Band]:
    """Return bands by cell id, learnt from runs of unchanged code. runs: latency records of each run."""
    bands = {}
    for cell_id, is_dense in {r.cell_id: r.cell.is_dense for run in runs for r in run}.items():
        logs = [math.log(x) for run in runs for r in run if r.cell_id == cell_id and (x := ratio(r, run)) is not None]
        if logs:
            spread = _HALF_WIDTH_SDS * float(np.std(logs, ddof=1)) if len(logs) > 1 else _HALF_WIDTH_OF_ONE_RUN
            half_width, median = max(_MIN_HALF_WIDTH_DENSE if is_dense else _MIN_HALF_WIDTH, spread), float(np.median(logs))
            low, middle, high = (round(math.exp(x), 5) for x in (median - half_width, median, median + half_width))
            bands[cell_id] = Band(ratio=middle, low=low, high=high, runs=len(logs))
    return bands


def ratio(record: Record, run: Sequence[Record]) -> float | None:
    """Return the median over rounds of a step's time divided by its yardstick's; None if the run has no yardstick.

    The yardstick of dense is the model's own forward pass; the yardstick of other policies is dense. run: all records of the run.
    """
    ours = record.measured(StepMetrics)
    if ours is None:
        return None
    yardstick_ms = ours.forward_ms
    if not record.cell.is_dense:
        others = (m for r in run if r.cell.is_dense and (m := r.measured(StepMetrics)))
        yardstick_ms = next((m.rounds_ms for m in others if m.together == ours.together), None)
    if not yardstick_ms or len(yardstick_ms) != len(ours.rounds_ms):
        return None
    return float(np.median(np.array(ours.rounds_ms) / np.array(yardstick_ms)))


def timed(pair: Pair, bands: Mapping[str, Band]) -> Iterator[Result]:
    """Yield the results of the checks that apply to a cell's times and memory."""
    base, now = pair.base.measured(PeakMetrics), pair.now.measured(PeakMetrics)
    if pair.base.measured(StepMetrics):
        yield _latency(pair, bands.get(pair.base.cell_id))
        yield from _prompt(pair)
    if task_of(pair.base).measures == "quality":
        yield _evaluation(pair)
    if base is not None and now is not None:
        yield _memory(pair, base, now)


def _latency(pair: Pair, band: Band | None) -> Result:
    elsewhere = setup_changes(pair.base, pair.now)
    if elsewhere or band is None:
        return "latency", "not compared", elsewhere or "the baseline has no noise band for this cell"
    measured = ratio(pair.now, pair.run)
    if measured is None:
        return "latency", "could not compare", "the run has no yardstick (dense, or the model's forward pass)"
    yardstick = "the model's forward pass" if pair.base.cell.is_dense else "dense's step"
    says = f"{measured:.3g} times {yardstick}; baseline: {band.ratio:.3g} [{band.low:.3g}, {band.high:.3g}] in {band.runs} runs"
    return "latency", _state(measured, band.low, band.high), says


def _state(value: float, low: float, high: float) -> State:
    """Return the state of a figure by its limits. A smaller figure is better."""
    return "regression" if value > high else "better" if value < low else "ok"


def _prompt(pair: Pair) -> Iterator[Result]:
    """Compare the time to the first token, in forward passes over a token."""
    times = [record.measured(StepMetrics) for record in (pair.base, pair.now)]
    passes = [t.first_token_ms / float(np.median(t.forward_ms)) for t in times if t and t.forward_ms]
    if len(passes) == 2 and all(passes) and not pair.setup_changes:
        yield _slower("prompt", passes[1] / passes[0], (1 / MAX_PROMPT_SLOWDOWN, MAX_PROMPT_SLOWDOWN), "forward passes")


def _evaluation(pair: Pair) -> Result:
    """Compare the speed of an evaluation. A second is allowed in addition to the ratio, for short evaluations."""
    base, now = _tokens_per_calibration(pair.base, pair.base_run), _tokens_per_calibration(pair.now, pair.run)
    if pair.setup_changes or base is None:
        return "speed", "not compared", pair.setup_changes or "the baseline has no calibrated speed of this cell"
    if now is None:
        return "speed", "could not compare", "the new record has no speed or no calibration"
    slowdown, seconds = base / now, pair.now.facts.measured_seconds or math.inf
    expected_seconds = seconds / slowdown  # the baseline's at the machine's current speed
    slowest = MAX_EVALUATION_SLOWDOWN + INTERRUPTION_SECONDS / expected_seconds
    fastest = 1 / (MAX_EVALUATION_SLOWDOWN + INTERRUPTION_SECONDS / seconds)
    return _slower("speed", slowdown, (fastest, slowest), "calibration steps")


def _tokens_per_calibration(record: Record, run: Sequence[Record]) -> float | None:
    """Return the tokens read in the time of a calibration step, the median over the run, which is robust to interruptions."""
    comparable = [r for r in run if not setup_changes(r, record)] or [record]
    speed = record.facts.tokens_per_second
    steps = [r.facts.calibration_ms for r in comparable if r.facts.calibration_ms]
    return float(speed * np.median(steps) / 1e3) if speed and steps else None


def _slower(check: str, slowdown: float, allowed: tuple[float, float], unit: str) -> Result:
    low, high = allowed
    says = f"takes {slowdown:.2g} times as many {unit} as the baseline (allowed: {low:.2g} to {high:.2g})"
    return check, _state(slowdown, low, high), says


def _memory(pair: Pair, base: PeakMetrics, now: PeakMetrics) -> Result:
    if pair.setup_changes or base.how != now.how:
        return "memory", "not compared", pair.setup_changes or f"measured in different ways: {base.how} -> {now.how}"
    outside: dict[State, list[str]] = {"regression": [], "better": [], "ok": []}
    for name, (factor, more, fewer) in _BYTES_ALLOWANCE.items():
        before, after = getattr(base, name), getattr(now, name)
        least, most = (before - fewer) / factor, factor * before + more
        limit = f"at least {least:,.0f}" if after < least else f"at most {most:,.0f}"
        outside[_state(after, least, most)].append(f"{name} {before:,} -> {after:,} (allowed: {limit})")
    state: State = "regression" if outside["regression"] else "better" if outside["better"] else "ok"
    return "memory", state, "; ".join(outside[state]) if state != "ok" else f"peak {base.peak_bytes:,} -> {now.peak_bytes:,}"
