"""Difference of two records in a metric, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from kvbench.harness.core.intervals import Ends
from kvbench.harness.records.beside import TraceFile
from kvbench.harness.records.figure_rules import Compared

Verdict = Literal["better", "worse", "same", "can't tell"]
Traces = tuple[TraceFile | None, TraceFile | None]  # of two records, where available


@dataclass(frozen=True)
class Difference:
    """Difference of two records in a metric.

    Attributes:
        metric: name of the metric.
        a: figure of the first record; None without a figure.
        b: figure of the second record; None without a figure.
        change: b - a; for `step_ms`, b / a - 1; None if unknown.
        low: lower end of the 95 % interval of `change`; None without an interval.
        high: upper end of the interval.
        verdict: verdict on b.
        why: explanation of the verdict, if the figures alone don't explain it.
    """

    metric: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    why: str = ""

    @classmethod
    def judged(
        cls, metric: str, a: float, b: float, change: float | None, ends: Ends | None, mark: Compared | None, why: str = ""
    ) -> Self:
        """Return a difference with the verdict that follows from its interval. mark: margin and direction of the metric."""
        low, high = ends or (None, None)
        verdict: Verdict = "can't tell" if mark is None else judge_interval(low, high, mark.margin, mark.more_is_better)
        return cls(metric, a, b, change, low, high, verdict, why)


def judge_interval(low: float | None, high: float | None, margin: float, more_is_better: bool = False) -> Verdict:
    """Return the verdict on a change with this interval; "same" if the interval lies within the margin."""
    if low is None or high is None:
        return "can't tell"
    if -margin <= low and high <= margin:
        return "same"
    if low > 0 or high < 0:
        return "better" if (low > 0) == more_is_better else "worse"
    return "can't tell"
