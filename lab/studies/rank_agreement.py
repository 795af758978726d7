"""Whether scores of ours order policies as published tables do: rank correlations, their intervals, and what is luck.

Axis letters: P policies, N questions or texts, R draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, rankdata

LEVEL = 0.05
DRAWS = 1000  # of the bootstrap
LOTS = 100_000  # orders given by lot, so that p can be as small as 1e-5
MAX_EXACT = 8  # policies: 40,320 orders are compared one by one
_BATCH = 10_000  # lots whose correlations are computed at once
Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of our policies in one task.

    Attributes:
        units: scores of each policy for each question or text; larger scores are better. [P, N].
        draws: mean score of each policy: as measured at index 0, then resampled. [P, 1 + R].
    """

    units: Values
    draws: Values


@dataclass(frozen=True)
class Table:
    """A published table, over the policies that we have measured too.

    Attributes:
        origin: the paper or leaderboard. Tables of one origin share models, prompts and code, so they are not independent.
        policies: their indices in our scores.
        scores: published, of these; more is better.
    """

    origin: str
    policies: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Agreement:
    """Mean rank correlations with the tables that count: over those of each origin, then over origins.

    Attributes:
        tables: number of tables.
        origins: number of papers and leaderboards with these tables.
        policies: number of policies in the largest table.
        tau: Kendall's tau.
        tau_interval: 95 % bootstrap interval of tau.
        rho: Spearman's rho.
        rho_interval: 95 % bootstrap interval of rho.
    """

    tables: int
    origins: int
    policies: int
    tau: float
    tau_interval: tuple[float, float]
    rho: float
    rho_interval: tuple[float, float]


def drawn(units: Values, answers: bool) -> Values:
    """Return the score of each policy as measured, then resampled. [P, N] -> [P, 1 + R].

    A share of right answers is drawn from its posterior under Jeffreys' prior. Resampling the answers themselves would give 0 in
    every draw if no answer is right. Policies are drawn independently although they have the same questions, which makes
    intervals wider. Texts are drawn with replacement, with equal draws for all policies.
    Source: Brown, Cai and DasGupta 2001, Statistical Science 16(2), 101-133.

    Args:
        units: scores of each policy for each question or text. [P, N].
        answers: whether scores are 1 for right and 0 for wrong answers.
    """
    draw, (policies, count) = np.random.default_rng(0), units.shape
    if answers:
        right = units.sum(1, keepdims=True)
        new = draw.beta(right + 0.5, count - right + 0.5, size=(policies, DRAWS))
    else:
        new = units[:, draw.integers(count, size=(DRAWS, count))].mean(-1)
    return np.concatenate([units.mean(1, keepdims=True), new], axis=1)


@cache
def differ(ours: Scores, policies: frozenset[int]) -> bool:
    """Whether the scores of these policies differ by more than the choice of questions explains, at 5 %."""
    return friedman(ours.units[sorted(policies)]) < LEVEL


def friedman(units: Values) -> float:
    """Chance that scores differ as much if no policy is better than another, by ranks within each question or text. [P, N].

    Of right and wrong answers it is Cochran's Q: a test of equal shares that were measured on the same questions.
    Source: Friedman 1937, JASA 32, 675-701, corrected for ties; Cochran 1950, Biometrika 37, 256-266.
    """
    policies = len(units)
    ranks = rankdata(units, axis=0) - (policies + 1) / 2
    spread = (ranks**2).sum()
    return float(chi2.sf((policies - 1) * (ranks.sum(1) ** 2).sum() / spread, policies - 1)) if spread else 1.0


def agreement(ours: Scores, tables: Sequence[Table]) -> Agreement | None:
    """Return the agreement of our scores with published tables; None if our scores differ only by noise in all tables.

    The bootstrap draws origins, not tables, because the tables of one paper are not independent.
    """
    counted = [one for one in tables if differ(ours, frozenset(one.policies))]
    if not counted:
        return None
    taus, rhos = (_by_origin(counted, [_with(one, ours.draws, correlation) for one in counted]) for correlation in (tau, rho))
    chosen = np.random.default_rng(0).integers(len(taus), size=(DRAWS, len(taus)))
    ends = [_central(found[chosen.T, np.arange(1, DRAWS + 1)].mean(0)) for found in (taus, rhos)]
    most = max(len(one.policies) for one in counted)
    return Agreement(len(counted), len(taus), most, float(taus[:, 0].mean()), ends[0], float(rhos[:, 0].mean()), ends[1])


def chance(ours: Scores, tables: Sequence[Table], found: float) -> float:
    """Chance that scores given to our policies by lot agree as much. Which tables count is decided anew for each lot.

    Args:
        ours: the scores.
        tables: published, those that don't count as well.
        found: Kendall's tau of the scores as they are.
    """
    policies = sorted({place for one in tables for place in one.policies})
    lots = orders(len(policies))
    given = np.zeros((len(lots), len(ours.units)), int)  # whose scores a policy gets
    given[:, policies] = np.array(policies)[lots]
    parts = [_by_lot(ours, tables, given[i : i + _BATCH]) for i in range(0, len(lots), _BATCH)]
    return _at_least(np.concatenate(parts), found, exact=len(policies) <= MAX_EXACT)


def _by_lot(ours: Scores, tables: Sequence[Table], given: NDArray[np.int64]) -> Values:
    """Mean tau of each lot; nan where no table counts. given: the policy whose scores each policy gets. [R, P]."""
    taus: dict[int, Values] = {}
    for policies in dict.fromkeys(one.policies for one in tables):
        alike = [i for i, one in enumerate(tables) if one.policies == policies]
        places = given[:, policies]
        found = taus_of(np.array([tables[i].scores for i in alike]), ours.draws[:, 0], places)
        _, first, lot = np.unique((1 << places).sum(1), return_index=True, return_inverse=True)
        counts = np.array([differ(ours, frozenset(places[i].tolist())) for i in first])[lot]
        taus |= zip(alike, np.where(counts, found, np.nan), strict=True)
    return _mean(_by_origin(tables, [taus[i] for i in range(len(tables))]))


def taus_of(published: Values, ours: Values, places: NDArray[np.int64]) -> Values:
    """Kendall's tau-b of tables with our scores, given by lot. published: [T, P]; ours: [Q]; places: [R, P] -> [T, R]."""
    first, second = np.triu_indices(places.shape[1], 1)
    lots = np.sign(ours[:, None] - ours)[places[:, first], places[:, second]]
    signs = np.sign(published[:, first] - published[:, second])
    with np.errstate(invalid="ignore"):
        return signs @ lots.T / np.sqrt((signs**2).sum(1)[:, None] * (lots**2).sum(1))


def orders(count: int) -> NDArray[np.int64]:
    """Return all orders of `count` policies, or `LOTS` random ones for more than `MAX_EXACT` policies. [R, count]."""
    if count <= MAX_EXACT:
        return np.array(list(permutations(range(count))))
    return np.random.default_rng(0).permuted(np.tile(np.arange(count), (LOTS, 1)), axis=1)


def permutation_test(a: Values, b: Values) -> tuple[float, float]:
    """Kendall's tau of two lists of scores, and the chance that random scores agree as much. a, b: [P].

    Tau is nan, and the chance 1, where one of both has no order.
    """
    value = float(tau(a[None], b[None])[0])
    if np.isnan(value):
        return value, 1.0
    (by_lot,) = taus_of(a[None], b, orders(len(a)))
    return value, _at_least(by_lot, value, exact=len(a) <= MAX_EXACT)


def _at_least(by_lot: Values, value: float, exact: bool) -> float:
    """Share of lots that agree as much; the order as measured is one of all, and counts as one more lot if they are drawn."""
    known = by_lot[~np.isnan(by_lot)]
    drawn_more = 0 if exact else 1
    return float((drawn_more + (known >= value - 1e-9).sum()) / (drawn_more + len(known)))


def tau(a: Values, b: Values) -> Values:
    """Kendall's tau-b of each row; nan where one of both has no order. a, b: [R, P]."""
    return _correlation(*(np.sign(x[:, :, None] - x[:, None, :]).reshape(len(x), -1) for x in (a, b)))


def rho(a: Values, b: Values) -> Values:
    """Spearman's rho of each row; nan where one of both has no order. a, b: [R, P]."""
    ranks = [rankdata(x, axis=1) for x in (a, b)]
    return _correlation(*(x - x.mean(1, keepdims=True) for x in ranks))


def _correlation(a: Values, b: Values) -> Values:
    """Return the correlation of rows whose mean is 0."""
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def _with(one: Table, draws: Values, correlation: Callable[[Values, Values], Values]) -> Values:
    """Correlation of a table with each of our draws. [1 + R]."""
    ours = draws[list(one.policies)].T
    return correlation(np.tile(one.scores, (len(ours), 1)), ours)


def _by_origin(tables: Sequence[Table], values: Sequence[Values]) -> Values:
    """Means over the tables of each origin. A row for each table -> [origins, R]."""
    origins = {one.origin: None for one in tables}
    return np.array([_mean([v for one, v in zip(tables, values, strict=True) if one.origin == origin]) for origin in origins])


def _mean(values: Values | Sequence[Values]) -> Values:
    """Over the first axis, without nan; nan where there is nothing else."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0).sum(0) / there.sum(0)


def _central(values: Values) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
