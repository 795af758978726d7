"""Ranks of policies by paired differences at 95 % confidence, corrected for the number of pairs.

A pair has one interval, from which all statements about the pair follow. One policy beats the other if the interval excludes 0.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, Ends, Interval, clustered
from kvbench.harness.records import Record
from kvbench.harness.report.pairing import paired
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import Stream, count, paired_shares


def shared_outcomes(a: Row, b: Row) -> tuple[str, str, Sequence[Stream] | None] | None:
    """Return the outcomes of both rows in one order, with the stream of each question; None unless the questions are equal.

    An outcome is "1" for a right answer, else "0". The streams are None if every question has its own cache.
    """
    ours, theirs = ({key: outcomes for key, (_, outcomes) in row.answered.items()} for row in (a, b))
    if not ours or {key: len(outcomes) for key, outcomes in ours.items()} != {key: len(text) for key, text in theirs.items()}:
        return None
    return "".join(ours.values()), "".join(theirs[key] for key in ours), a.answered_streams


def answer_comparison(a: Row, b: Row) -> Comparison | None:
    """Return the share of right answers that b loses to a; None unless the questions are equal."""
    shared = shared_outcomes(b, a)
    return None if shared is None else outcome_comparison(*shared)


def outcome_comparison(a: str, b: str, streams: Sequence[Stream] | None) -> Comparison:
    """Compare the right answers to the same questions: b's share minus a's.

    The p-value is from a sign test over questions (McNemar's test), or over streams.

    Args:
        a: outcomes of the first policy, one "0" or "1" per question; "1" is right.
        b: outcomes of the second policy.
        streams: stream of each question; None if every question has its own cache.
    """
    change = (b.count("1") - a.count("1")) / len(a)
    if streams is None:
        pairs = Counter(zip(a, b, strict=True))
        return Comparison(change, sign_test(pairs["1", "0"], pairs["0", "1"]), partial(paired_shares, a, b))
    if count(streams) < MIN_BLOCKS:
        return Comparison(change, None, lambda _: None)
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(streams))}
    stream_numbers = [numbers[stream] for stream in streams]
    gains = np.bincount(stream_numbers, [int(y) - int(x) for x, y in zip(a, b, strict=True)]).astype(np.float64)
    interval = clustered(gains, np.bincount(stream_numbers).astype(np.float64))
    more, fewer = int((gains > 0).sum()), int((gains < 0).sum())
    agree = (more - fewer) * change > 0  # most streams have the sign of the mean
    return compared(interval, None if interval.p is None else sign_test(more, fewer) if agree else 1.0)


FAMILY_WISE = 0.05  # probability of any false difference among all pairs if no pair differs

Pair = tuple[int, int]


@dataclass(frozen=True)
class Change:
    """Loss of a pair's second record relative to the first: nats per token, or share of right answers. Above 0 is worse.

    Attributes:
        value: the difference.
        low: lower end of the interval; None if the text is too short for an interval, or streams are too few.
        high: upper end of the interval.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)

    def reversed(self) -> Change:
        """Return the loss of the first record relative to the second."""
        return Change(-self.value, None if self.high is None else -self.high, None if self.low is None else -self.low)


@dataclass(frozen=True)
class Comparison:
    """Comparison of a pair, before correction for the number of pairs.

    Attributes:
        value: difference, as in `Change`.
        p: two-sided p-value of the hypothesis that the pair does not differ; None without an interval.
        ends: returns the interval as one of a number of intervals that all hold at once.
    """

    value: float
    p: float | None
    ends: Callable[[int], Ends | None]

    def among(self, comparisons: int = 1) -> Change:
        """Return the change with its interval as one of `comparisons` intervals."""
        return Change(self.value, *(self.ends(comparisons) or (None, None)))


def nll_comparison(a: Record, b: Record) -> Comparison | None:
    """Return the loss of b relative to a, in nats per token; None if the two can't be paired."""
    difference = paired(b, a)
    return None if difference is None else compared(difference, difference.p)


def compared(interval: Interval, p: float | None) -> Comparison:
    """Return the comparison of a pair, given the interval of the second policy's loss, and the p-value."""
    return Comparison(interval.mean, p, lambda comparisons: interval.among(comparisons).ends)


def corrected(comparisons: Mapping[Pair, Comparison]) -> dict[Pair, Change]:
    """Return every change with the interval at the level at which Holm's procedure tests its pair.

    The interval excludes 0 only if the test finds a difference. For answers, the interval and the test use different methods, so
    the interval is extended to 0 if the test finds no difference.

    Source: Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70.
    """
    result = {pair: comparison.among() for pair, comparison in comparisons.items() if comparison.p is None}
    tested = sorted((comparison.p, pair) for pair, comparison in comparisons.items() if comparison.p is not None)
    untold = len(tested)
    for place, (p, pair) in enumerate(tested):
        differs = untold == len(tested) - place and p * untold <= FAMILY_WISE
        change = comparisons[pair].among(untold)
        result[pair] = change if differs else _with_zero(change)
        untold -= differs
    return result


def _with_zero(change: Change) -> Change:
    if change.low is None or change.high is None:
        return change
    return Change(change.value, min(change.low, 0.0), max(change.high, 0.0))


@lru_cache(maxsize=4096)
def sign_test(above: int, below: int) -> float:
    """Return the two-sided p-value of the hypothesis that differences are as often above 0 as below."""
    return min(1.0, 2 * sum(math.comb(above + below, k) for k in range(min(above, below) + 1)) / 2 ** (above + below))


Rank = tuple[int, int]  # the best and the worst possible place


def ranks(rivals: Collection[int], changes: Mapping[Pair, Change]) -> dict[int, Rank | None]:
    """Return the rank of each policy among `rivals`; None if a policy is comparable with no other.

    A rival that is not comparable may be better or worse, and therefore widens the rank.

    Args:
        rivals: numbers of the policies.
        changes: changes of comparable pairs, which may include pairs outside of `rivals`.
    """
    among = set(rivals)
    known = {pair: change for pair, change in changes.items() if change.low is not None and among.issuperset(pair)}
    better = [pair[:: change.sign] for pair, change in known.items() if change.sign]
    beats, beaten = Counter(one for one, _ in better), Counter(worse for _, worse in better)
    compared = set(itertools.chain.from_iterable(known))
    return {rival: (1 + beaten[rival], len(rivals) - beats[rival]) if rival in compared else None for rival in rivals}
