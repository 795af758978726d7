"""Ranks of policies by paired differences at 95 % confidence, corrected for the number of pairs.

A pair has one interval, from which all statements about the pair follow. One policy beats the other if the interval excludes 0.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, Interval, clustered
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import Stream, count, paired_shares


def shared_outcomes(a: Row, b: Row) -> tuple[str, str, Sequence[Stream] | None] | None:
    """Return the outcomes of both rows in one order, with the stream of each question; None unless the questions are equal.

    An outcome is "1" for a right answer, else "0". The streams are None if every question has its own cache. If some questions
    share streams, a question with its own cache counts as a stream.
    """
    counts, others = ({key: len(outcomes) for key, (outcomes, _) in row.answered.items()} for row in (a, b))
    if not counts or counts != others:
        return None
    ours, theirs = ("".join(row.answered[key][0] for key in counts) for row in (a, b))
    streams = {key: of_questions or [(key, i) for i in range(counts[key])] for key, (_, of_questions) in a.answered.items()}
    shared = any(of_questions for _, of_questions in a.answered.values())
    return ours, theirs, list(itertools.chain(*streams.values())) if shared else None


def answer_comparison(a: Row, b: Row) -> Interval | None:
    """Return the share of right answers that b loses to a; None unless the questions are equal."""
    shared = shared_outcomes(b, a)
    return None if shared is None else outcome_comparison(*shared)


def outcome_comparison(a: str, b: str, streams: Sequence[Stream] | None, comparisons: int = 1) -> Interval:
    """Compare the right answers to the same questions: b's share minus a's.

    The p-value is from a sign test over questions (McNemar's test), or over streams.

    Args:
        a: outcomes of the first policy, one "0" or "1" per question; "1" is right.
        b: outcomes of the second policy.
        streams: as in `shared_outcomes`.
        comparisons: number of intervals over questions that all hold at once.
    """
    change = (b.count("1") - a.count("1")) / len(a)
    if streams is None:
        pairs = Counter(zip(a, b, strict=True))
        p = sign_test(pairs["1", "0"], pairs["0", "1"])
        return Interval(change, *paired_shares(a, b, comparisons), 1, len(a), p, partial(outcome_comparison, a, b, None))
    if count(streams) < MIN_BLOCKS:
        return Interval(change, None, None, 1, count(streams))
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(streams))}
    stream_numbers = [numbers[stream] for stream in streams]
    gains = np.bincount(stream_numbers, [int(y) - int(x) for x, y in zip(a, b, strict=True)]).astype(np.float64)
    interval = clustered(gains, np.bincount(stream_numbers).astype(np.float64))
    more, fewer = int((gains > 0).sum()), int((gains < 0).sum())
    agree = (more - fewer) * change > 0  # most streams have the sign of the mean
    return interval if interval.p is None else replace(interval, p=sign_test(more, fewer) if agree else 1.0)


FAMILY_WISE = 0.05  # probability of any false difference among all pairs if no pair differs

Pair = tuple[str, str]  # ids of two rows


def pair_changes(rows: Sequence[Row], comparison: Callable[[Row, Row], Interval | None]) -> dict[Pair, Interval]:
    """Return the loss of the second of two rows to the first, for every pair that can be compared, in both orders.

    The number of pairs corrects the intervals. Rows that differ only in the seed are draws of one policy, and not compared: more
    draws of a control must not widen intervals. comparison: returns the loss of its second argument to the first.
    """
    pairs = ((a, b) for a, b in itertools.combinations(rows, 2) if a.settings_key != b.settings_key)
    compared = {(a.id, b.id): lost for a, b in pairs if (lost := comparison(a, b)) is not None}
    changes = corrected(compared)
    return changes | {(b, a): change.negated() for (a, b), change in changes.items()}


def corrected(comparisons: Mapping[Pair, Interval]) -> dict[Pair, Interval]:
    """Return every interval at the level at which Holm's procedure tests its pair.

    The interval excludes 0 only if the test finds a difference. For answers, the interval and the test use different methods, so
    the interval is extended to 0 if the test finds no difference.

    Source: Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70.
    """
    result = dict(comparisons)
    tested = sorted(((x.p, pair) for pair, x in comparisons.items() if x.p is not None), key=lambda test: test[0])
    untold = len(tested)
    for place, (p, pair) in enumerate(tested):
        differs = untold == len(tested) - place and p * untold <= FAMILY_WISE
        change = comparisons[pair].among(untold)
        if not differs and change.low is not None and change.high is not None:
            change = replace(change, low=min(change.low, 0.0), high=max(change.high, 0.0))
        result[pair] = change
        untold -= differs
    return result


@lru_cache(maxsize=4096)
def sign_test(above: int, below: int) -> float:
    """Return the two-sided p-value of the hypothesis that differences are as often above 0 as below."""
    return min(1.0, 2 * sum(math.comb(above + below, k) for k in range(min(above, below) + 1)) / 2 ** (above + below))


Rank = tuple[int, int]  # the best and the worst possible place


def ranks(rivals: Collection[str], changes: Mapping[Pair, Interval]) -> dict[str, Rank | None]:
    """Return the rank of each policy among `rivals`; None if a policy is comparable with no other.

    A rival that is not comparable may be better or worse, and therefore widens the rank. rivals: ids of the policies' rows.
    changes: changes of comparable pairs (`pair_changes`), which may include pairs outside of `rivals`.
    """
    result: dict[str, Rank | None] = {}
    for rival in rivals:
        known = [change for other in rivals if (change := changes.get((other, rival))) is not None and change.low is not None]
        signs = [change.sign for change in known]
        result[rival] = (1 + signs.count(1), len(rivals) - signs.count(-1)) if signs else None
    return result
