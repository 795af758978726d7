"""The Pareto front: policies that no other beats in quality, bytes and time together."""

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
    """Whether each row is on the front; None if unknown.

    A row beats another if it has no more bytes, is neither surely worse in NLL nor surely slower, and has fewer bytes, or is
    surely better in NLL, or surely faster. Rows whose NLLs are not comparable don't beat each other. A row is unknown if all
    rows with no more bytes are incomparable to it, or if it has no perplexity or no cache.
    """
    scored = [row.perplexity if row.nll is not None else None for row in rows]
    pairs = nll_pairs(scored)
    better = surely_less(pairs)
    faster = surely_less(_time_pairs([row.latency if row.kv_bytes else None for row in rows]))
    comparable = {frozenset(pair) for pair in [*pairs, *better]}
    eligible = [i for i, row in enumerate(rows) if row.nll is not None and row.kv_bytes]
    result: list[bool | None] = [None] * len(rows)
    for p in eligible:
        cheap = [q for q in eligible if q != p and (rows[q].kv_bytes or 0) <= (rows[p].kv_bytes or 0)]
        rivals = [q for q in cheap if frozenset((p, q)) in comparable]
        beaten = any(_beats((q, p), rows[q].kv_bytes != rows[p].kv_bytes, better, faster) for q in rivals)
        result[p] = False if beaten else True if rivals or not cheap else None
    return result


def _beats(pair: Pair, fewer_bytes: bool, better: set[Pair], faster: set[Pair]) -> bool:
    """Whether the first of a pair beats the second, given that it has no more bytes."""
    if pair[::-1] in better or pair[::-1] in faster:
        return False
    return fewer_bytes or pair in better or pair in faster


def _time_pairs(records: Sequence[Record | None]) -> dict[Pair, tuple[float, float]]:
    """(median log ratio of step times, p-value of a sign test) of all pairs that were timed in the same rounds."""
    pairs = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(records), 2):
        ratios = None if a is None or b is None else round_ratios(a, b)
        if ratios is not None:
            logs = [math.log(r) for r in ratios]
            pairs[i, j] = statistics.median(logs), sign_test(logs)
    return pairs
