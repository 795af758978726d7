"""The front: which policies earn the bytes of their cache and the time of their steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.ranks import Pair, nll_pairs, sign_test, surely_less
from kvbench.harness.report.rows import Row
from kvbench.harness.report.speed import round_ratios


def front(rows: Sequence[Row]) -> list[bool | None]:
    """Of each row whether no other beats it; None where that can't be told, or is not asked.

    One beats another with no more bytes if it is not surely worse in NLL nor surely slower, and has fewer bytes, or is
    surely better in NLL, or surely faster. Where the two can't be compared in NLL, neither beats the other; who could be
    beaten only by such ones can't be told. Not asked of policies without a perplexity, or without a cache.
    """
    scored = [row.perplexity if row.nll is not None else None for row in rows]
    pairs = nll_pairs(scored)
    better = surely_less(pairs)
    faster = surely_less(_time_pairs([row.latency if row.kv_bytes else None for row in rows]))
    comparable = {frozenset(pair) for pair in [*pairs, *better]}
    places = [i for i, row in enumerate(rows) if row.nll is not None and row.kv_bytes]
    result: list[bool | None] = [None] * len(rows)
    for p in places:
        cheap = [q for q in places if q != p and (rows[q].kv_bytes or 0) <= (rows[p].kv_bytes or 0)]
        rivals = [q for q in cheap if frozenset((p, q)) in comparable]
        beaten = any(_beats((q, p), rows[q].kv_bytes != rows[p].kv_bytes, better, faster) for q in rivals)
        result[p] = False if beaten else True if rivals or not cheap else None
    return result


def _beats(pair: Pair, fewer_bytes: bool, better: set[Pair], faster: set[Pair]) -> bool:
    """Whether the first of a pair beats the second, and has no more bytes."""
    if pair[::-1] in better or pair[::-1] in faster:
        return False
    return fewer_bytes or pair in better or pair in faster


def _time_pairs(records: Sequence[Record | None]) -> dict[Pair, tuple[float, float]]:
    """Difference in the logarithm of a step's time of every two that were timed in turn, with the p-value of a sign test."""
    found = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(records), 2):
        ratios = None if a is None or b is None else round_ratios(a, b)
        if ratios is not None:
            logs = [math.log(r) for r in ratios]
            found[i, j] = statistics.median(logs), sign_test(logs)
    return found
