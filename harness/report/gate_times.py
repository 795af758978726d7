"""The gate's checks of what a busy machine can spoil: steps, speed of evaluation, peaks of memory.

None is compared as it stands: a step is a ratio to dense's, dense's and all other times to the calibration step of the same run.
What looks worse is measured again, and the majority of three decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.report.bands import Band, is_dense, ratio
from kvbench.harness.report.compare import moved
from kvbench.harness.report.gate_pair import Pair, Result

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
_EVALUATIONS = ("perplexity", "streameval", "arc_stream", "lm_eval")


def timed(pair: Pair, bands: Mapping[str, Band]) -> Iterator[Result]:
    """All of them that a cell has figures for."""
    if "rounds_ms" in pair.base.metrics:
        yield _latency(pair, bands.get(pair.base.cell_id))
        yield from _prompt(pair)
    if pair.base.cell["task"].get("name") in _EVALUATIONS:
        yield _evaluation(pair)
    if "peak_bytes" in pair.base.metrics:
        yield _memory(pair)


def _latency(pair: Pair, band: Band | None) -> Result:
    elsewhere = moved(pair.base, pair.now)
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
    if moved(pair.base, pair.now):
        return
    times = [_in_calibrations(r.metrics, r.metrics.get("first_token_ms")) for r in (pair.base, pair.now)]
    if times[0] and times[1]:
        yield _slower("prompt", times[1] / times[0], SLOWEST_PROMPT)


def _in_calibrations(metrics: dict[str, Any], ms: float | None) -> float | None:
    beside = metrics.get("calibration_ms")
    return ms / float(np.median(beside)) if beside and ms else None


def _evaluation(pair: Pair) -> Result:
    if pair.moved:
        return "speed", "not compared", pair.moved
    speeds = [_tokens_a_calibration(pair.base, pair.base_run), _tokens_a_calibration(pair.now, pair.run)]
    if speeds[0] is None:
        return "speed", "not compared", "the baseline has no calibration of it"
    if speeds[1] is None:
        return "speed", "could not compare", "it has no speed, or no calibration"
    return _slower("speed", speeds[0] / speeds[1], SLOWEST)


def _tokens_a_calibration(record: Record, run: Sequence[Record]) -> float | None:
    """Tokens read in the time of a calibration step: its median over the run, since a single one may be interrupted."""
    beside = [r for r in run if not moved(r, record)] or [record]
    speed = record.facts.get("tokens_per_second")
    steps = [r.facts["calibration_ms"] for r in beside if r.facts.get("calibration_ms")]
    return float(speed * np.median(steps) / 1e3) if speed and steps else None


def _slower(check: str, times: float, most: float) -> Result:
    says = f"takes {times:.2f} times as many calibration steps as in the baseline, at most {most:g}"
    return check, "ok" if times <= most else "regression", says


def _memory(pair: Pair) -> Result:
    base, now = pair.base.metrics, pair.now.metrics
    if pair.moved or base.get("how") != now.get("how"):
        return "memory", "not compared", pair.moved or "read in another way"
    told = []
    for name, (times, more) in _BYTES.items():
        most = times * base[name] + more
        if not now[name] <= most:
            told.append(f"{name} {base[name]:,} -> {now[name]:,}, at most {most:,.0f}")
    return "memory", "regression" if told else "ok", "; ".join(told) or f"peak {base['peak_bytes']:,} -> {now['peak_bytes']:,}"
