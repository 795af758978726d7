"""How many times as fast: ratios of steps that were timed in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbench.harness.core.intervals import median_interval
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics


def speed_up(record: Record, bases: Sequence[Record]) -> str:
    """How many times as fast as the yardstick that was measured side by side with it; empty if none was."""
    ratios = next((found for base in bases if (found := round_ratios(base, record)) is not None), None)
    if ratios is None:
        return ""
    low, high = median_interval(ratios)
    return f"{np.median(ratios):.3g}× [{low:.3g}, {high:.3g}]"


def round_ratios(a: Record, b: Record) -> list[float] | None:
    """A's time of a step over b's, round by round; None if the two were not timed in turn."""
    x, y = a.measured(StepMetrics), b.measured(StepMetrics)
    if a is b or x is None or y is None or x.together != y.together:
        return None
    ratios: list[float] = (np.array(x.rounds_ms) / np.array(y.rounds_ms)).tolist()
    return ratios
