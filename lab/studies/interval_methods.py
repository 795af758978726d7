"""Other intervals for the mean of dependent data, which docs/experiments.md compares with ours. No result uses them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvbench.harness.core import intervals
from kvbench.harness.core.intervals import Interval

Array = NDArray[np.float64]
_RESAMPLES = 2000


def percentile_bootstrap(sums: Array, tokens: Array, size: int, capacity: int) -> Interval:
    """Our former method: circular block bootstrap percentiles, blocks of Politis and White 2004 and of twice the capacity."""
    from arch.bootstrap import optimal_block_length

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = float(optimal_block_length(sums / tokens)["circular"].iloc[0])
    runs = math.ceil(max(asked, 2 * capacity / size, 1))
    mean, blocks = float(sums.sum() / tokens.sum()), len(sums) / runs
    if blocks < 20:
        return Interval(mean, None, None, runs * size, blocks)
    starts = np.random.default_rng(0).integers(len(sums), size=(_RESAMPLES, math.ceil(blocks)))
    ahead = np.cumsum(np.concatenate([[0.0], sums, sums[:runs]]))
    draws = (ahead[runs:] - ahead[:-runs])[starts].mean(1) / (runs * tokens[0])
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(mean, float(low), float(high), runs * size, blocks)


def only_if_uncorrelated(sums: Array, tokens: Array, size: int, capacity: int) -> Interval:
    """Ours, but without an interval if neighbouring blocks look correlated."""
    found, off = intervals.interval(sums, tokens, size, capacity), _blocks(sums)
    calm = float(off[1:] @ off[:-1]) < 0.3 * float(off @ off)
    return found if calm else dataclasses.replace(found, low=None, high=None, p=None)


def only_if_many_count(sums: Array, tokens: Array, size: int, capacity: int) -> Interval:
    """Ours, but without an interval if few runs dominate: (sum of squares)^2 / sum of fourth powers below 20."""
    found, off = intervals.interval(sums, tokens, size, capacity), sums - sums.mean()
    many = float(off @ off) ** 2 > 20 * float((off**4).sum())
    return found if many else dataclasses.replace(found, low=None, high=None, p=None)


def student(sums: Array, tokens: Array, size: int, capacity: int) -> Interval:
    """Student's t over blocks, without adjustments."""
    off = _blocks(sums)
    return _around(sums, tokens, stats.t.ppf(0.975, len(off) - 1) * off.std(ddof=1) * math.sqrt(len(off)))


def cosines(sums: Array, tokens: Array, size: int, capacity: int, count: int = 12) -> Interval:
    """Student's t with the equal-weighted cosine estimate of variance; Lazarus, Lewis, Stock and Watson 2018, JBES 36(4)."""
    n = len(sums)
    waves = np.cos(np.pi * np.outer(np.arange(1, count + 1), np.arange(n) + 0.5) / n) * math.sqrt(2 / n)
    error = math.sqrt(float(((waves @ sums) ** 2).mean()) * n)
    return _around(sums, tokens, stats.t.ppf(0.975, count) * error)


def studentized_bootstrap(sums: Array, tokens: Array, size: int, capacity: int) -> Interval:
    """Bootstrap-t over blocks; Hall 1988, Annals of Statistics 16(3)."""
    off = _blocks(sums)
    draws = off[np.random.default_rng(0).integers(len(off), size=(_RESAMPLES, len(off)))]
    with np.errstate(divide="ignore"):
        low, high = np.quantile(draws.mean(1) / draws.std(1, ddof=1), [0.025, 0.975]) * off.std(ddof=1) * len(off)
    return _between(sums, tokens, -high, -low)


def bca(sums: Array, tokens: Array, size: int, capacity: int) -> Interval:
    """Bias-corrected accelerated bootstrap over blocks; Efron 1987, JASA 82(397)."""
    off = _blocks(sums)
    found = stats.bootstrap((off,), np.sum, n_resamples=_RESAMPLES, method="BCa", rng=np.random.default_rng(0))
    return _between(sums, tokens, *found.confidence_interval)


def subsampling(sums: Array, tokens: Array, size: int, capacity: int) -> Interval:
    """Quantiles of sums over all stretches of a block's length; Politis, Romano and Wolf 1999, Subsampling."""
    length = len(sums) // intervals.MIN_BLOCKS
    ahead = np.cumsum(np.concatenate([[0.0], sums - sums.mean()]))
    roots = (ahead[length:] - ahead[:-length]) / math.sqrt(length)
    low, high = np.quantile(roots, [0.025, 0.975]) * math.sqrt(len(sums))
    return _between(sums, tokens, -high, -low)


def _blocks(sums: Array) -> Array:
    """Deviations of block sums from their expectation. [20]."""
    starts = np.arange(intervals.MIN_BLOCKS) * len(sums) // intervals.MIN_BLOCKS
    return np.add.reduceat(sums - sums.mean(), starts)


def _around(sums: Array, tokens: Array, reach: float) -> Interval:
    return _between(sums, tokens, -reach, reach)


def _between(sums: Array, tokens: Array, low: float, high: float) -> Interval:
    """The interval of the mean, given the bounds of the sum's deviation."""
    mean, total = float(sums.sum() / tokens.sum()), float(tokens.sum())
    return Interval(mean, mean + low / total, mean + high / total, 0, intervals.MIN_BLOCKS)


TRIED: dict[str, Callable[[Array, Array, int, int], Interval]] = {
    "**t over 20 blocks, adjusted for correlation and skewness**": intervals.interval,
    "the same, only where blocks look uncorrelated": only_if_uncorrelated,
    "the same, only where many runs count": only_if_many_count,
    "t over 20 blocks": student,
    "12 cosines, t": cosines,
    "studentized bootstrap of 20 blocks": studentized_bootstrap,
    "BCa bootstrap of 20 blocks": bca,
    "sub-sampling, stretches of a block": subsampling,
    "percentile circular block bootstrap (before)": percentile_bootstrap,
}
