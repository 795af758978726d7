"""Rank policies by paired differences at 95 % confidence, corrected for the number of pairs.

A pair has one interval, and everything that is said of the two follows from it: one beats the other if the interval excludes 0.
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
from kvbench.harness.report.shares import Stream, by_stream, count, paired_shares


@dataclass(frozen=True)
class SharedOutcomes:
    """Outcomes of two rows for the same questions: one digit per question, 1 for a right answer.

    Attributes:
        a: of one row.
        b: of the other.
        streams: of each question; None if every question has a cache of its own.
    """

    a: str
    b: str
    streams: Sequence[Stream] | None

    @property
    def change(self) -> float:
        """Share of right answers of `b` minus that of `a`."""
        return (self.b.count("1") - self.a.count("1")) / len(self.a)


def shared_outcomes(a: Row, b: Row) -> SharedOutcomes | None:
    """Outcomes of both rows in the same order; None unless they answered the same questions."""
    ours, theirs = a.answered, b.answered
    texts = {key: outcomes for key, (_, outcomes) in theirs.items()}
    if not ours or {key: len(outcomes) for key, (_, outcomes) in ours.items()} != {k: len(v) for k, v in texts.items()}:
        return None
    return SharedOutcomes("".join(text for _, text in ours.values()), "".join(texts[key] for key in ours), a.answered_streams)


def answer_comparison(a: Row, b: Row) -> Comparison | None:
    """The share of right answers that b loses to a; None unless they answered the same questions.

    The p-value is that of a sign test over questions (McNemar's test), or over streams.
    """
    shared = shared_outcomes(b, a)
    if shared is None:
        return None
    if shared.streams is None:
        a_right, b_right = (int(outcomes, 2) for outcomes in (shared.a, shared.b))
        only = [(x & ~y).bit_count() for x, y in ((a_right, b_right), (b_right, a_right))]
        return Comparison(shared.change, sign_test(*only), partial(paired_shares, shared.a, shared.b))
    sums, counts = by_stream(shared.a, shared.b, shared.streams)
    if count(shared.streams) < MIN_BLOCKS:
        return Comparison(shared.change, None, lambda _: None)
    interval = clustered(np.array(sums), np.array(counts))
    more, fewer = sum(x > 0 for x in sums), sum(x < 0 for x in sums)
    agree = (more - fewer) * shared.change > 0  # not if most streams say the opposite of the mean
    return compared(interval, None if interval.p is None else sign_test(more, fewer) if agree else 1.0)


FAMILY_WISE = 0.05  # chance of any false difference among all pairs, if no two differ

Pair = tuple[int, int]


@dataclass(frozen=True)
class Change:
    """Loss of a pair's second record relative to the first: nats per token, or share of right answers. Above 0 is worse.

    Attributes:
        value: the difference.
        low: lower end of its interval; None if the text is too short for one, or streams are too few.
        high: upper end.
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
    """A pair, before it is known how many are compared.

    Attributes:
        value: as of `Change`.
        p: two-sided p-value of the hypothesis that the two do not differ; None without an interval.
        ends: the interval, as one of so many that all hold at once.
    """

    value: float
    p: float | None
    ends: Callable[[int], Ends | None]

    def among(self, comparisons: int = 1) -> Change:
        """The change with its interval as one of so many."""
        return Change(self.value, *(self.ends(comparisons) or (None, None)))


def nll_comparison(a: Record, b: Record) -> Comparison | None:
    """Return the loss of b relative to a, in nats per token; None if the two can't be paired."""
    difference = paired(b, a)
    return None if difference is None else compared(difference, difference.p)


def compared(interval: Interval, p: float | None) -> Comparison:
    """A pair with this interval for what the second loses, and this p-value."""
    return Comparison(interval.mean, p, lambda comparisons: interval.among(comparisons).ends)


def corrected(comparisons: Mapping[Pair, Comparison]) -> dict[Pair, Change]:
    """Every change with the interval at the level at which Holm's procedure tests its pair.

    It excludes 0 only if the test finds a difference. Where the test is another than that of the interval, as for answers, the
    interval is extended to 0 if the test finds none.

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


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, to compare with the family-wise error rate; valid under any dependence.

    Source: Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


@lru_cache(maxsize=4096)
def sign_test(above: int, below: int) -> float:
    """Two-sided p-value of the hypothesis that differences are as often above 0 as below."""
    return min(1.0, 2 * sum(math.comb(above + below, k) for k in range(min(above, below) + 1)) / 2 ** (above + below))


Rank = tuple[int, int]  # the best and the worst possible place


def ranks(rivals: Collection[int], changes: Mapping[Pair, Change]) -> dict[int, Rank | None]:
    """Return the rank of each of these policies among them; None if it is comparable with no other.

    A rival that is not comparable may be better or worse, so it widens the rank.

    Args:
        rivals: numbers of the policies.
        changes: of comparable pairs, of others too.
    """
    among = set(rivals)
    known = {pair: change for pair, change in changes.items() if change.low is not None and among.issuperset(pair)}
    better = [pair[:: change.sign] for pair, change in known.items() if change.sign]
    beats, beaten = Counter(one for one, _ in better), Counter(worse for _, worse in better)
    compared = set(itertools.chain.from_iterable(known))
    return {rival: (1 + beaten[rival], len(rivals) - beats[rival]) if rival in compared else None for rival in rivals}
