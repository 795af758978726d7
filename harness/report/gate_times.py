"""The gate's checks of what a busy machine can spoil: steps, speed of evaluation, peaks of memory.

None is compared as it stands: a step is a ratio to dense's, dense's and all other times to the calibration step of the same run.
What looks worse is measured again, and the majority of three decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import PeakMetrics, StepMetrics
from kvbench.harness.report.bands import Band, is_dense, ratio
from kvbench.harness.report.compare import setup_changes
from kvbench.harness.report.gate_pair import Pair, Result
from kvbench.harness.report.task import task_of

CHECKS = ("latency", "prompt", "speed", "memory")
SLOWEST = (
    4.0  # times as long as in the baseline an evaluation may take, in calibration steps: beside other work, short ones took 2.9
)
SLOWEST_PROMPT = 3.0  # and a prompt, which is short
_BYTES = {
    "peak_bytes": (1.5, 2**20),
    "growth_bytes": (1.5, 2**20),
    "allocated_bytes": (1.02, 2**16),
}  # times, and more: pages vary


def timed(pair: Pair, bands: Mapping[str, Band]) -> Iterator[Result]:
    """All of them that a cell has figures for."""
    if pair.base.measured(StepMetrics):
        yield _latency(pair, bands.get(pair.base.cell_id))
        yield from _prompt(pair)
    if task_of(pair.base).speed_counts:
        yield _evaluation(pair)
    base, now = pair.base.measured(PeakMetrics), pair.now.measured(PeakMetrics)
    if base is not None and now is not None:
        yield _memory(pair, base, now)


def _latency(pair: Pair, band: Band | None) -> Result:
    elsewhere = setup_changes(pair.base, pair.now)
    if elsewhere:
        return "latency", "not compared", elsewhere
    if band is None:
        return "latency", "not compared", "the baseline knows no noise of it"
    found = ratio(pair.now, pair.run)
    if found is None:
        return "latency", "could not compare", "no yardstick was measured beside it"
    yardstick = "the calibration step" if is_dense(pair.base) else "dense's step"
    says = f"{found:.3g} of {yardstick}; {band.ratio:.3g} in the baseline, [{band.low:.3g}, {band.high:.3g}] in {band.runs} runs"
    return "latency", "ok" if found <= band.high else "regression", says


def _prompt(pair: Pair) -> Iterator[Result]:
    """Of the time to the first token."""
    if setup_changes(pair.base, pair.now):
        return
    base, now = (_in_calibrations(r.measured(StepMetrics)) for r in (pair.base, pair.now))
    if base and now:
        yield _slower("prompt", now / base, SLOWEST_PROMPT)


def _in_calibrations(metrics: StepMetrics | None) -> float | None:
    """Time to the first token, in calibration steps."""
    if metrics is None or not metrics.calibration_ms:
        return None
    return metrics.first_token_ms / float(np.median(metrics.calibration_ms))


def _evaluation(pair: Pair) -> Result:
    if pair.setup_changes:
        return "speed", "not compared", pair.setup_changes
    speeds = [_tokens_a_calibration(pair.base, pair.base_run), _tokens_a_calibration(pair.now, pair.run)]
    if speeds[0] is None:
        return "speed", "not compared", "the baseline has no calibration of it"
    if speeds[1] is None:
        return "speed", "could not compare", "it has no speed, or no calibration"
    return _slower("speed", speeds[0] / speeds[1], SLOWEST)


def _tokens_a_calibration(record: Record, run: Sequence[Record]) -> float | None:
    """Tokens read in the time of a calibration step: its median over the run, since a single one may be interrupted."""
    beside = [r for r in run if not setup_changes(r, record)] or [record]
    speed = record.facts.tokens_per_second
    steps = [r.facts.calibration_ms for r in beside if r.facts.calibration_ms]
    return float(speed * np.median(steps) / 1e3) if speed and steps else None


def _slower(check: str, times: float, most: float) -> Result:
    says = f"takes {times:.2f} times as many calibration steps as in the baseline, at most {most:g}"
    return check, "ok" if times <= most else "regression", says


def _memory(pair: Pair, base: PeakMetrics, now: PeakMetrics) -> Result:
    if pair.setup_changes or base.how != now.how:
        return "memory", "not compared", pair.setup_changes or "read in another way"
    told = []
    for name, (times, more) in _BYTES.items():
        before, after = getattr(base, name), getattr(now, name)
        most = times * before + more
        if not after <= most:
            told.append(f"{name} {before:,} -> {after:,}, at most {most:,.0f}")
    return "memory", "regression" if told else "ok", "; ".join(told) or f"peak {base.peak_bytes:,} -> {now.peak_bytes:,}"
