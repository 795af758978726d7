"""Ranks of many policies: equal policies are separated in at most 5 % of tables, and unknown differences widen a rank."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.harness.report.ranks import holm, rank_intervals, sign_test, surely_less

TABLES = 1000
AT_MOST = 0.072  # of tables: 5 %, and 3.2 standard errors of a share of 1,000


def p_value(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def table(policies: int, shared: bool, rng: np.random.Generator) -> dict[tuple[int, int], tuple[float, float]]:
    """Differences of equal policies with exact p-values: means are sums of normal errors with known weights."""
    weights = np.eye(policies)
    if shared:  # tokens that are hard for several policies
        weights = np.hstack([weights, rng.gamma(0.3, size=(policies, 4)), np.full((policies, 1), 5.0)])
    means = weights @ rng.normal(size=weights.shape[1])
    return {
        (i, j): (float(means[i] - means[j]), p_value((means[i] - means[j]) / np.linalg.norm(weights[i] - weights[j])))
        for i in range(policies)
        for j in range(i + 1, policies)
    }


@pytest.mark.parametrize("shared", [False, True], ids=["independent", "sharing tokens"])
@pytest.mark.parametrize("policies", [5, 10])
def test_of_equal_policies_none_is_surely_better_in_19_tables_of_20(policies, shared):
    rng = np.random.default_rng(policies)
    pairs = [table(policies, shared, rng) for _ in range(TABLES)]
    told_apart = sum(set(rank_intervals(policies, p)) != {(1, policies)} for p in pairs)
    assert told_apart / TABLES <= AT_MOST
    uncorrected = sum(any(p < 0.05 for _, p in found.values()) for found in pairs)
    assert uncorrected / TABLES > 3 * AT_MOST, "without a correction this would fail"


def test_what_differs_is_told_apart():
    means = [0.0, 1.0, 2.0, 2.01, 5.0]
    pairs = {(i, j): (means[i] - means[j], p_value((means[i] - means[j]) / 0.1)) for i in range(5) for j in range(i + 1, 5)}
    assert rank_intervals(5, pairs) == [(1, 1), (2, 2), (3, 4), (3, 4), (5, 5)]


def test_holm_corrects_step_by_step():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_rank_widens_by_what_is_not_known():
    sure = {(0, 1): (-1.0, 1e-9)}
    assert rank_intervals(4, sure) == [(1, 3), (2, 4), None, None]
    assert rank_intervals(1, {}) == [None]


def test_what_follows_from_two_sure_pairs_is_sure():
    """0 is less than 1, and 1 is less than 2. 2 can only be compared with 1."""
    assert surely_less({(0, 1): (-1.0, 1e-9), (1, 2): (-1.0, 1e-9)}) == {(0, 1), (1, 2), (0, 2)}
    assert rank_intervals(3, {(0, 1): (-1.0, 1e-9), (1, 2): (-1.0, 1e-9)}) == [(1, 1), (2, 2), (3, 3)]
    round_about = {(0, 1): (-1.0, 1e-9), (1, 2): (-1.0, 1e-9), (0, 2): (1.0, 1e-9)}
    assert surely_less(round_about) == set(), "a contradiction proves nothing"


def test_the_closure_is_whole_for_long_chains():
    chain = {(i, i + 1): (-1.0 if i % 2 else 1.0, 1e-9) for i in range(5)}
    straight = {tuple(sorted((a, b))): (-1.0 if a < b else 1.0, 1e-9) for a, b in [(4, 1), (1, 5), (5, 0), (0, 3), (3, 2)]}
    assert surely_less(chain) == {(1, 0), (1, 2), (3, 2), (3, 4), (5, 4)}
    order = [4, 1, 5, 0, 3, 2]
    assert surely_less(straight) == {(order[i], order[j]) for i in range(6) for j in range(i + 1, 6)}


def test_the_sign_test_counts_signs():
    assert sign_test([1.0] * 6) == 2 / 2**6
    assert sign_test([1.0, -1.0, 0.0]) == 1.0
    assert sign_test([2.0] * 9 + [-5.0]) == 2 * 11 / 2**10
    assert sign_test([]) == 1.0
