"""Confidence intervals for means over one text, whose tokens depend on each other.

Works on the sums over short runs of tokens that records keep. The text is cut into `FEWEST_BLOCKS` equal blocks, each
so much longer than a cache remembers that the blocks are almost independent; the interval is Student's t over them, wider
where neighbouring blocks are correlated and shifted where their distribution is skewed (docs/statistics.md).

Source: the method of batch means, Schmeiser 1982, Operations Research 30(3); with the two adjustments of N-Skart, Tafazzoli,
    Steiger and Wilson 2011, IEEE Transactions on Automatic Control 56(2).
Differs: the number of blocks is fixed instead of tested for; the correlation is corrected for its bias; skewness is
    adjusted for by Hall's transformation, which is monotone, so that the interval and the p-value always agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

FEWEST_BLOCKS = 20  # blocks of one text; texts or questions, where those are the blocks
SHORTEST_BLOCK = 1600  # tokens: with shorter ones, intervals of bursty texts cover less than 93 % (docs/statistics.md)
LEVEL = 0.95
_FEWEST_DEGREES = 4  # of freedom: with fewer a few long texts decide alone
_LARGEST_CORRELATION = 0.8  # of neighbouring blocks: the interval is then three times as wide
_SYMMETRIC = 1e-8  # smaller skewness makes no difference beyond rounding


@dataclass(frozen=True)
class Interval:
    """A mean over tokens, and how sure it is.

    Attributes:
        mean: over the tokens.
        low: lower end; None where the text is too short for an interval.
        high: upper end; None likewise.
        block: tokens in each of the blocks that the interval is computed from; where the text is too short, the fewest that a
            block may have.
        blocks: how many of them there are; where there is no interval, how many as long as that the text would have, or as
            how many texts of equal length these count.
        p: two-sided p-value of the hypothesis that the mean is 0: below 1 - `LEVEL` exactly where the interval excludes 0;
            None where there is no interval.
    """

    mean: float
    low: float | None
    high: float | None
    block: int
    blocks: float
    p: float | None = None


def interval(sums: NDArray[np.float64], tokens: NDArray[np.float64], size: int, capacity: int) -> Interval:
    """The mean over tokens with its interval.

    Whether there is one depends on lengths alone, never on what the data look like: a text in which something rare
    happens not to occur looks calm, and its interval is the one that is wrong.

    Args:
        sums: what was summed over each run of tokens. [n].
        tokens: how many tokens each run has. [n].
        size: positions that a run spans.
        capacity: the largest cache among what is compared, in tokens.

    Returns:
        No ends if the text doesn't have `FEWEST_BLOCKS` blocks of `SHORTEST_BLOCK` positions, and of twice the capacity.
    """
    shortest, positions = max(SHORTEST_BLOCK, 2 * capacity, size), len(sums) * size
    if positions < FEWEST_BLOCKS * shortest:
        return Interval(float(sums.sum() / tokens.sum()), None, None, shortest, positions / shortest)
    starts = np.arange(FEWEST_BLOCKS) * len(sums) // FEWEST_BLOCKS
    sums, tokens = np.add.reduceat(sums, starts), np.add.reduceat(tokens, starts)
    return _student(sums, tokens, round(positions / FEWEST_BLOCKS), neighbours=True)


def clustered(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> Interval:
    """The mean over tokens with an interval over texts, which are taken to be independent of each other.

    Args:
        sums: what was summed over each text. [n], at least `FEWEST_BLOCKS` of them.
        tokens: how many tokens each text has. [n].

    Returns:
        No ends if a few long texts outweigh all others.
    """
    assert len(sums) >= FEWEST_BLOCKS
    return _student(sums, tokens, round(float(tokens.mean())), neighbours=False)


def _student(sums: NDArray[np.float64], tokens: NDArray[np.float64], block: int, neighbours: bool) -> Interval:
    """Student's interval of the ratio of two sums over blocks, with its p-value.

    Args:
        sums: over each block. [k].
        tokens: of each block. [k].
        block: length to report, in tokens.
        neighbours: blocks that follow each other may be correlated.
    """
    count, mean = len(sums), float(sums.sum() / tokens.sum())
    degrees = _degrees_of_freedom(tokens)
    if degrees < _FEWEST_DEGREES:
        return Interval(mean, None, None, block, degrees + 1)
    off = (sums - mean * tokens) / (tokens.sum() - tokens)  # by what leaving the block out would change the mean: the jackknife
    variance = float(off @ off) * (count - 1) / count
    error = math.sqrt(variance * (_inflation(off) if neighbours else 1.0))
    if error <= 1e-12 * abs(mean):  # all blocks equal, but for rounding
        return Interval(mean, mean, mean, block, count, float(mean == 0))
    skew = _skewness(off) / (6 * math.sqrt(count))
    reach = float(stdtrit(degrees, (1 + LEVEL) / 2))
    low, high = (mean - error * _skewed(t, skew) for t in (reach, -reach))
    p = 2 * float(stdtr(degrees, -abs(_symmetric(mean / error, skew))))
    return Interval(mean, low, high, block, count, p)


def _degrees_of_freedom(tokens: NDArray[np.float64]) -> float:
    """Of a variance estimated from blocks of these lengths, if what a block adds to the sum grows with its length.

    One less than the number of blocks if all are equal.

    Source: Satterthwaite 1946, Biometrics Bulletin 2(6).
    """
    squares = tokens**2
    return float(squares.sum() ** 2 / (squares @ squares)) - 1


def _inflation(off: NDArray[np.float64]) -> float:
    """How many times larger the variance of a mean over blocks is for the correlation of neighbours; at least 1.

    That of a first-order autoregressive process.

    Source: Kendall 1954, Biometrika 41, for the bias of the correlation, -(1 + 3 r) / k.
    """
    correlation = float(off[1:] @ off[:-1]) / max(float(off @ off), 1e-300)
    correlation += (1 + 3 * correlation) / len(off)
    correlation = min(max(correlation, 0.0), _LARGEST_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def _skewness(values: NDArray[np.float64]) -> float:
    """The adjusted Fisher-Pearson coefficient."""
    count, off = len(values), values - values.mean()
    return float(np.mean(off**3) / np.mean(off**2) ** 1.5) * math.sqrt(count * (count - 1)) / (count - 2)


def _symmetric(t: float, skew: float) -> float:
    """The statistic of a mean with the skewness of its distribution taken out; monotone in `t`.

    Args:
        t: mean over its standard error.
        skew: skewness of a block / (6 sqrt(blocks)).

    Source: Hall 1992, Journal of the Royal Statistical Society B 54(1).
    """
    return t + skew + 2 * skew * t**2 + 4 / 3 * skew**2 * t**3


def _skewed(t: float, skew: float) -> float:
    """The inverse of `_symmetric`."""
    if abs(skew) < _SYMMETRIC:
        return t
    return (float(np.cbrt(1 + 6 * skew * (t - skew))) - 1) / (2 * skew)


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Interval of a share of independent trials, at `LEVEL`.

    Source: Wilson 1927, Journal of the American Statistical Association 22.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
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
