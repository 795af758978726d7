"""Speed-ups: ratios of step times from the same rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbench.harness.core.intervals import median_interval
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics


def speed_up(record: Record, bases: Sequence[Record]) -> str:
    """Speed-up over the base that was timed in the same rounds, with its interval; empty if there is none."""
    ratios = next((r for base in bases if (r := round_ratios(base, record)) is not None), None)
    if ratios is None:
        return ""
    low, high = median_interval(ratios)
    return f"{np.median(ratios):.3g}× [{low:.3g}, {high:.3g}]"


def round_ratios(a: Record, b: Record) -> list[float] | None:
    """Step time of a over that of b, round by round; None if they were not timed in the same rounds."""
    x, y = a.measured(StepMetrics), b.measured(StepMetrics)
    if a is b or x is None or y is None or x.together != y.together:
        return None
    ratios: list[float] = (np.array(x.rounds_ms) / np.array(y.rounds_ms)).tolist()
    return ratios
