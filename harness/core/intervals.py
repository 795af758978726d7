"""Confidence intervals for means over one text, whose tokens depend on each other.

The input is sums over short runs of tokens, as records keep them. The text is cut into `MIN_BLOCKS` equal blocks. Each is much
longer than the memory of a cache, so the blocks are almost independent. The interval is Student's t over the blocks, widened if
neighbouring blocks are correlated and shifted if their distribution is skewed (docs/statistics.md).

A text that is read until its interval is narrow enough is looked at several times. Each of k planned looks has an interval at
1 - (1 - `LEVEL`) / k, so that all k intervals hold at once at `LEVEL`. The interval at which reading stopped therefore holds at
`LEVEL`, whatever the reason for stopping.

Source: the method of batch means, Schmeiser 1982, Operations Research 30(3), with the two adjustments of N-Skart, Tafazzoli,
    Steiger and Wilson 2011, IEEE Transactions on Automatic Control 56(2). Several looks: the repeated confidence intervals of
    Jennison and Turnbull 1989, Journal of the Royal Statistical Society B 51(3), by Bonferroni's bound (Dunn 1961, Journal of
    the American Statistical Association 56).
Differs: the number of blocks is fixed, not chosen by a test; the correlation is corrected for its bias; skewness is adjusted by
    Hall's transformation, which is monotone, so that the interval and the p-value always agree. Jennison and Turnbull take
    narrower bounds from the correlation of the looks, which assumes that their variance is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_BLOCKS = 20  # blocks of one text, or texts or questions that serve as blocks
MIN_BLOCK_TOKENS = 1600  # with shorter blocks, intervals of bursty texts cover less than 93 % (docs/statistics.md)
LEVEL = 0.95
_MIN_DEGREES_OF_FREEDOM = 4  # with fewer, a few long texts decide alone
_MAX_CORRELATION = 0.8  # largest correlation of neighbouring blocks; it makes the interval three times as wide
_MORE_CLUSTERS = 0.2  # added for the design effect; without them, intervals of rare answers cover as little as 87 %
_NEGLIGIBLE_SKEW = 1e-8
_NEGLIGIBLE_ERROR = 1e-12  # relative to the mean: all blocks are equal


class Spread(NamedTuple):
    """Distribution of a mean over blocks.

    Attributes:
        error: standard error of the mean.
        degrees: degrees of freedom of Student's t.
        skew: skewness of a block / (6 sqrt(blocks)).
        looks: planned looks times comparisons, the divisor of Bonferroni's bound.
    """

    error: float
    degrees: float
    skew: float
    looks: int


Ends = tuple[float, float]  # lower and upper end of an interval


@dataclass(frozen=True)
class Interval:
    """A mean over tokens and its confidence interval.

    Attributes:
        mean: over the tokens.
        low: lower end; None if the text is too short for an interval.
        high: upper end; None if the text is too short for an interval.
        block: tokens per block; if the text is too short, the minimum.
        blocks: number of blocks; without an interval, the number of blocks of minimum length in the text, or the number of
            texts of equal length that would be as informative.
        p: two-sided p-value of the hypothesis that the mean is 0, corrected for looks like the interval. It is below
            1 - `LEVEL` exactly if the interval excludes 0. None without an interval.
        corrected: returns the interval as one of a number of intervals; None without an interval, or where all blocks are equal.
    """

    mean: float
    low: float | None
    high: float | None
    block: int
    blocks: float
    p: float | None = None
    corrected: Callable[[int], Interval] | None = field(default=None, repr=False, compare=False)

    def among(self, comparisons: int) -> Interval:
        """Return the interval as one of `comparisons` intervals that all hold at once at `LEVEL` (Bonferroni's bound)."""
        return self if self.corrected is None else self.corrected(comparisons)

    def negated(self) -> Interval:
        """Return the interval of the negated mean."""
        low, high = (None if end is None else -end for end in (self.high, self.low))
        return replace(self, mean=-self.mean, low=low, high=high, corrected=None)

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        return 0 if self.low is None or self.high is None else (self.low > 0) - (self.high < 0)

    @property
    def ends(self) -> Ends | None:
        """Lower and upper end; None if the text is too short for an interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def half_width(self) -> float | None:
        """Half the distance between the ends; None if the text is too short for an interval."""
        return None if self.ends is None else (self.ends[1] - self.ends[0]) / 2


def interval(sums: NDArray[np.float64], tokens: NDArray[np.float64], size: int, capacity: int, looks: int = 1) -> Interval:
    """Return the mean over the tokens of one text, with its interval.

    The existence of an interval depends only on lengths, never on the data. A text in which a rare event happens not to occur
    has a small variance, and an interval from that variance would be too narrow.

    Args:
        sums: sum over each run of tokens. [n].
        tokens: number of tokens in each run. [n].
        size: positions that a run spans.
        capacity: capacity of the largest cache in the comparison, in tokens.
        looks: number of planned lengths of the text at which reading might have stopped.

    Returns:
        Interval, without ends if the text has fewer than `MIN_BLOCKS` blocks of `MIN_BLOCK_TOKENS` and of twice the capacity.
    """
    min_block, positions = _min_block(size, capacity), len(sums) * size
    if not long_enough(len(sums), size, capacity):
        return Interval(float(sums.sum() / tokens.sum()), None, None, min_block, positions / min_block)
    return _student(batches(sums), batches(tokens), round(positions / MIN_BLOCKS), neighbours=True, looks=looks)


def over_samples(sums: NDArray[Any], tokens: int) -> Interval:
    """Return the mean over the tokens of samples, which are runs of one text, with its interval.

    Args:
        sums: sum over each sample. [n].
        tokens: number of tokens in each sample.
    """
    return interval(sums.astype(np.float64), np.full(len(sums), float(tokens)), tokens, 0)


def long_enough(runs: int, size: int, capacity: int) -> bool:
    """Whether a text of `runs` runs of `size` positions has an interval."""
    return runs * size >= MIN_BLOCKS * _min_block(size, capacity)


def _min_block(size: int, capacity: int) -> int:
    """Return the smallest number of tokens in a block."""
    return max(MIN_BLOCK_TOKENS, 2 * capacity, size)


def batches(runs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add up sums over runs to sums over `MIN_BLOCKS` blocks. [n] to [MIN_BLOCKS]."""
    return np.add.reduceat(runs, np.arange(MIN_BLOCKS) * len(runs) // MIN_BLOCKS)


def reach(tokens: NDArray[np.float64]) -> float | None:
    """Return the quantile of Student's t for blocks of these lengths, at `LEVEL`; None if a few long blocks outweigh the rest."""
    from scipy.special import stdtrit

    degrees = _degrees_of_freedom(tokens)
    return None if degrees < _MIN_DEGREES_OF_FREEDOM else float(stdtrit(degrees, (1 + LEVEL) / 2))


def look_lengths(tokens: int, capacity: int) -> list[int]:
    """Return the planned looks at a text that is read until its interval is narrow. Each look doubles the length read.

    Args:
        tokens: length of the whole text, which the last look has read.
        capacity: capacity of the largest cache in the comparison, in tokens.

    Returns:
        Tokens read at each look. The first look is the shortest that has an interval after the cache has filled.
    """
    shortest = MIN_BLOCKS * max(MIN_BLOCK_TOKENS, 2 * capacity) + capacity
    doubling = [tokens >> k for k in range(tokens.bit_length()) if tokens >> k > shortest]
    return doubling[::-1] or [tokens]


def clustered(sums: NDArray[np.float64], tokens: NDArray[np.float64], looks: int = 1) -> Interval:
    """Return the mean over tokens, with an interval over texts, which are assumed to be independent.

    Args:
        sums: sum over each text. [n], n >= `MIN_BLOCKS`.
        tokens: number of tokens in each text. [n].
        looks: number of planned lengths at which reading might have stopped.

    Returns:
        Interval, without ends if a few long texts outweigh the rest.
    """
    assert len(sums) >= MIN_BLOCKS
    return _student(sums, tokens, round(float(tokens.mean())), neighbours=False, looks=looks)


def _student(sums: NDArray[np.float64], tokens: NDArray[np.float64], block: int, neighbours: bool, looks: int) -> Interval:
    """Return Student's interval of the ratio of two sums over blocks, with its p-value.

    Args:
        sums: sum over each block. [k].
        tokens: number of tokens in each block. [k].
        block: block length to report, in tokens.
        neighbours: whether consecutive blocks may be correlated.
        looks: number of planned looks, the divisor of Bonferroni's bound.
    """
    count, mean = len(sums), float(sums.sum() / tokens.sum())
    degrees = _degrees_of_freedom(tokens)
    if degrees < _MIN_DEGREES_OF_FREEDOM:
        return Interval(mean, None, None, block, degrees + 1)
    influence = (sums - mean * tokens) / (tokens.sum() - tokens)  # influence of each block on the mean, by the jackknife
    variance = float(influence @ influence) * (count - 1) / count
    error = math.sqrt(variance * (_inflation(influence) if neighbours else 1.0))
    if error <= _NEGLIGIBLE_ERROR * abs(mean):
        return Interval(mean, mean, mean, block, count, float(mean == 0))
    return _with_ends(mean, block, count, Spread(error, degrees, _skewness(influence) / (6 * math.sqrt(count)), looks))


def _with_ends(mean: float, block: int, blocks: float, spread: Spread) -> Interval:
    """Return the interval of a mean over blocks, with its p-value."""
    from scipy.special import stdtr, stdtrit  # a third of a second: only where there is an interval

    error, degrees, skew, looks = spread
    reach = float(stdtrit(degrees, 1 - (1 - LEVEL) / 2 / looks))
    low, high = (mean - error * _skewed(t, skew) for t in (reach, -reach))
    p = min(1.0, 2 * looks * float(stdtr(degrees, -abs(_symmetric(mean / error, skew)))))

    def corrected(comparisons: int) -> Interval:
        return _with_ends(mean, block, blocks, spread._replace(looks=looks * comparisons))

    return Interval(mean, low, high, block, blocks, p, corrected)


def _degrees_of_freedom(tokens: NDArray[np.float64]) -> float:
    """Return the degrees of freedom of a variance from blocks of these lengths: the number of blocks - 1 if all are equal.

    A block's contribution to the sum is assumed to grow with its length.

    Source: Satterthwaite 1946, Biometrics Bulletin 2(6).
    """
    squares = tokens**2
    return float(squares.sum() ** 2 / (squares @ squares)) - 1


def _inflation(influence: NDArray[np.float64]) -> float:
    """Return the factor, at least 1, by which correlated neighbours increase the variance of the mean of an AR(1) process.

    Source: Kendall 1954, Biometrika 41, for the bias of the correlation, -(1 + 3 r) / k.
    """
    correlation = float(influence[1:] @ influence[:-1]) / max(float(influence @ influence), 1e-300)
    correlation += (1 + 3 * correlation) / len(influence)
    correlation = min(max(correlation, 0.0), _MAX_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def _skewness(values: NDArray[np.float64]) -> float:
    """Return the adjusted Fisher-Pearson coefficient of skewness."""
    count, off = len(values), values - values.mean()
    return float(np.mean(off**3) / np.mean(off**2) ** 1.5) * math.sqrt(count * (count - 1)) / (count - 2)


def _symmetric(t: float, skew: float) -> float:
    """Return the t statistic of a mean, with the skewness of its distribution removed; monotone in `t`.

    `skew` is the skewness of a block / (6 sqrt(blocks)).

    Source: Hall 1992, Journal of the Royal Statistical Society B 54(1).
    """
    return t + skew + 2 * skew * t**2 + 4 / 3 * skew**2 * t**3


def _skewed(t: float, skew: float) -> float:
    """Return the inverse of `_symmetric`."""
    if abs(skew) < _NEGLIGIBLE_SKEW:
        return t
    return (float(np.cbrt(1 + 6 * skew * (t - skew))) - 1) / (2 * skew)


def wilson(hits: int, trials: int, comparisons: int = 1) -> tuple[float, float]:
    """Return the confidence interval of a share of independent trials. `comparisons` such intervals hold at once at `LEVEL`.

    Source: Wilson 1927, Journal of the American Statistical Association 22.
    """
    return _score_interval(hits / trials, trials, NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / comparisons))


def clustered_share(hits: NDArray[np.float64], trials: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the confidence interval of a share of clustered trials, at `LEVEL`; None if a few large clusters outweigh the rest.

    The interval is Wilson's with Student's t and an effective number of independent trials. That number is the number of trials
    divided by the design effect: the variance of the share over its variance if trials were independent. The estimate includes a
    small part of one more cluster, half right and half wrong. Without that part, clusters that happen to agree would have an
    estimated variance of zero.

    Args:
        hits: number of hits in each cluster. [n], n >= `MIN_BLOCKS`.
        trials: number of trials in each cluster. [n].

    Source: Kish 1965, Survey Sampling, for the design effect; Korn and Graubard 1998, Survey Methodology 24(2), for the
        effective number of trials with quantiles of t.
    """
    quantile = reach(trials)
    if quantile is None:
        return None
    total, size = float(trials.sum()), float(trials.mean())
    count, enlarged = len(trials) + _MORE_CLUSTERS, total + _MORE_CLUSTERS * size
    share = (float(hits.sum()) + _MORE_CLUSTERS * size / 2) / enlarged
    off = hits - share * trials
    squares = float(off @ off) + _MORE_CLUSTERS * size**2 * ((1 - share) ** 2 + share**2) / 2
    design_effect = count / (count - 1) * squares / (enlarged * share * (1 - share))
    return _score_interval(float(hits.sum()) / total, total / max(design_effect, 1.0), quantile)


def _score_interval(share: float, trials: float, quantile: float) -> tuple[float, float]:
    """Return the Wilson interval: shares at most `quantile` standard errors from the share observed in `trials` trials."""
    weight = quantile**2 / trials
    middle, half = share + weight / 2, quantile * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the distribution-free confidence interval of the median, at `LEVEL` or more: two order statistics.

    With fewer than 6 values no two order statistics reach that level, and both ends are infinite.

    Source: David and Nagaraja 2003, Order Statistics, Section 7.1.
    """
    ordered, n = sorted(values), len(values)
    below = 0.0  # probability that at most `rank` of n values are below the median
    rank = -1
    while below + math.comb(n, rank + 1) / 2**n <= (1 - LEVEL) / 2:
        rank += 1
        below += math.comb(n, rank) / 2**n
    return (ordered[rank], ordered[n - 1 - rank]) if rank >= 0 else (-math.inf, math.inf)
