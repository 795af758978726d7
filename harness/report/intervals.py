"""Confidence intervals for means over one text, whose tokens depend on each other.

Works on the sums over short runs of tokens that records keep. The circular block bootstrap resamples whole
stretches of text, each as long as the dependence in the data and at least twice the largest cache, because
what a cache forgets comes back as one long stretch of worse predictions (docs/statistics.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
FEWEST_BLOCKS = 20  # with fewer an interval would be a guess
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over tokens, and how sure it is.

    Attributes:
        mean: over the tokens.
        low: lower end; None where the text is too short for an interval.
        high: upper end; None likewise.
        block: length of the resampled stretches, in tokens.
        blocks: how many of them the text has.
        p: two-sided p-value of "the mean is 0"; None where there is no interval.
    """

    mean: float
    low: float | None
    high: float | None
    block: int
    blocks: float
    p: float | None = None


def interval(sums: NDArray[np.float64], tokens: NDArray[np.float64], size: int, capacity: int) -> Interval:
    """The mean over tokens with its interval.

    Args:
        sums: what was summed over each run of tokens. [n].
        tokens: how many tokens each run has. [n].
        size: positions that a run spans.
        capacity: the largest cache among what is compared, in tokens.

    Returns:
        No ends if the text has fewer than `FEWEST_BLOCKS` blocks.
    """
    mean = float(sums.sum() / tokens.sum())
    filled = tokens > 0
    length = max(data_driven_block(sums[filled] / tokens[filled]), 2 * capacity / size, 1)
    runs = math.ceil(length)
    blocks = len(sums) / runs
    if blocks < FEWEST_BLOCKS:
        return Interval(mean, None, None, runs * size, blocks)
    draws = _resampled_means(sums, tokens, runs)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), runs * size, blocks, _p_value(mean, float(low), float(high)))


def _p_value(mean: float, low: float, high: float) -> float:
    """Two-sided, of a normal mean whose interval at `LEVEL` has these ends."""
    half = (high - low) / 2
    if half == 0.0:
        return float(mean == 0.0)
    return math.erfc(1.959963984540054 * abs(mean) / half / math.sqrt(2))


def clustered(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> Interval:
    """The mean over tokens with an interval over texts: whole texts are resampled, each as likely as any other.

    Args:
        sums: what was summed over each text. [n], at least `FEWEST_BLOCKS` of them.
        tokens: how many tokens each text has. [n].
    """
    assert len(sums) >= FEWEST_BLOCKS
    draws = _resampled_means(sums, tokens, 1)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = float(sums.sum() / tokens.sum())
    p = _p_value(mean, float(low), float(high))
    return Interval(mean, float(low), float(high), round(float(tokens.mean())), len(sums), p)


def _resampled_means(sums: NDArray[np.float64], tokens: NDArray[np.float64], runs: int) -> NDArray[np.float64]:
    """Means of `RESAMPLES` texts put together from stretches of `runs` runs, wrapping around at the end."""
    starts = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, math.ceil(len(sums) / runs)))

    def stretch(x: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.concatenate([[0.0], np.cumsum(np.concatenate([x, x[:runs]]))])
        return np.asarray(total[runs : runs + len(x)] - total[: len(x)])

    means: NDArray[np.float64] = stretch(sums)[starts].sum(1) / stretch(tokens)[starts].sum(1)
    return means


def data_driven_block(x: NDArray[np.float64]) -> float:
    """Block length for the circular block bootstrap of a mean, in elements of `x`.

    Source: Politis and White 2004, Econometric Reviews 23(1), with the correction of Patton, Politis and White
    2009, Econometric Reviews 28(4): flat-top lag window, bandwidth from the first run of small correlations.
    """
    n = len(x)
    if n < 8 or float(np.ptp(x)) == 0.0:
        return 1.0
    centred = x - x.mean()
    run = max(5, math.ceil(math.sqrt(math.log10(n))))
    most = math.ceil(math.sqrt(n)) + run
    covariance = np.array([float(centred[: n - k] @ centred[k:]) / n for k in range(most + 1)])
    correlation = np.abs(covariance[1:] / covariance[0])
    bound = 2 * math.sqrt(math.log10(n) / n)
    small = [m for m in range(1, most - run + 2) if (correlation[m - 1 : m - 1 + run] < bound).all()]
    first = small[0] if small else next((k for k in range(most, 0, -1) if correlation[k - 1] > bound), 1)
    bandwidth = min(2 * max(first, 1), most)
    lags = np.arange(1, bandwidth + 1)
    weight = np.where(lags / bandwidth <= 0.5, 1.0, 2 * (1 - lags / bandwidth))
    slope = 2 * float((weight * lags * covariance[1 : bandwidth + 1]).sum())
    variance = covariance[0] + 2 * float((weight * covariance[1 : bandwidth + 1]).sum())
    if variance <= 0:
        return float(bandwidth)
    best: float = (2 * slope**2 / (4 / 3 * variance**2)) ** (1 / 3) * n ** (1 / 3)
    return min(max(best, 1.0), math.ceil(min(3 * math.sqrt(n), n / 3)))


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Interval of a share of independent trials, at `LEVEL`.

    Source: Wilson 1927, Journal of the American Statistical Association 22.
    """
    z = 1.959963984540054  # the normal distribution's quantile at (1 + LEVEL) / 2
    share, weight = hits / trials, z * z / trials
    middle, half = share + weight / 2, z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The distribution-free interval of the median, at `LEVEL` or more: two order statistics.

    Both infinite with fewer than 6 values, of which no two bound the median that surely.

    Source: David and Nagaraja 2003, Order Statistics, Section 7.1.
    """
    ordered, n = sorted(values), len(values)
    below = 0.0  # chance that at most `rank` of n values lie below the median
    rank = -1
    while below + math.comb(n, rank + 1) / 2**n <= (1 - LEVEL) / 2:
        rank += 1
        below += math.comb(n, rank) / 2**n
    return (ordered[rank], ordered[n - 1 - rank]) if rank >= 0 else (-math.inf, math.inf)
