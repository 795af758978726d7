"""Which policies are surely better than others: paired differences, corrected for the number of pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.pairing import paired

FAMILY_WISE = 0.05  # chance of any false "surely" among all pairs, if no two differ

Pair = tuple[int, int]
Pairs = Mapping[Pair, tuple[float, float]]  # (first minus second, two-sided p-value)


def nll_pairs(records: Sequence[Record | None]) -> dict[Pair, tuple[float, float]]:
    """Paired differences in NLL of all comparable pairs of records, by their indices.

    Args:
        records: of one question; None for a policy without perplexity.
    """
    pairs = {}
    for (i, a), (j, b) in itertools.combinations(enumerate(records), 2):
        difference = None if a is None or b is None else paired(a, b)
        if difference is not None and difference.p is not None:
            pairs[i, j] = difference.mean, difference.p
    return pairs


def surely_less(pairs: Pairs) -> set[Pair]:
    """All (i, j) where i is surely less than j, by Holm-corrected p-values or by transitivity.

    If i is less than k, and k less than j, then i is less than j, even if the two are not comparable.
    """
    adjusted = holm([p for _, p in pairs.values()])
    sure = [(pair, change) for (pair, (change, _)), p in zip(pairs.items(), adjusted, strict=True) if p <= FAMILY_WISE]
    less = {pair if change < 0 else pair[::-1] for pair, change in sure}
    for k, i, j in itertools.product(sorted({place for pair in less for place in pair}), repeat=3):
        if (i, k) in less and (k, j) in less:
            less.add((i, j))
    return {pair for pair in less if pair[::-1] not in less}  # contradictions prove nothing


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, to compare with the family-wise error rate; valid under any dependence.

    Source: Holm 1979, Scandinavian Journal of Statistics 6(2), 65-70.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of the hypothesis that differences are as often above 0 as below; zeros don't count."""
    signs = [d > 0 for d in differences if d != 0]
    fewer = min(sum(signs), len(signs) - sum(signs))
    return min(1.0, 2 * sum(math.comb(len(signs), k) for k in range(fewer + 1)) / 2 ** len(signs))


def rank_intervals(count: int, pairs: Pairs) -> list[tuple[int, int] | None]:
    """(best, worst) possible rank of each policy; None if it is comparable with no other.

    A rival that is not comparable may be better or worse, so it widens the interval.

    Args:
        count: number of policies.
        pairs: differences of comparable policies; less is better.
    """
    better, compared = surely_less(pairs), set(itertools.chain.from_iterable(pairs))
    return [
        (1 + sum(j == place for _, j in better), count - sum(i == place for i, _ in better)) if place in compared else None
        for place in range(count)
    ]
