"""A figure of two records, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["better", "worse", "same", "can't tell"]
Traces = tuple[Path | None, Path | None]  # the files of two records' per-token figures, where they are at hand


@dataclass(frozen=True)
class Difference:
    """One metric of two records.

    Attributes:
        metric: what is compared.
        a: the first record's figure; None where it has none.
        b: the second's.
        change: of b against a: a difference, for `step_ms` a ratio less 1; None where there is none.
        low: lower end of its 95 % interval; None where none can be given.
        high: upper end.
        verdict: on b.
        why: of a verdict that the figures alone don't explain.
    """

    metric: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    why: str = ""


def judged(low: float | None, high: float | None, margin: float, more_is_better: bool = False) -> Verdict:
    """Whether an interval of a change is for better or worse, too small to matter, or too wide to tell."""
    if low is None or high is None:
        return "can't tell"
    if -margin <= low and high <= margin:
        return "same"
    if low > 0 or high < 0:
        return "better" if (low > 0) == more_is_better else "worse"
    return "can't tell"
