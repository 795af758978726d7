"""Ranks of many policies: equal policies are separated in at most 5 % of tables, and unknown differences widen a rank."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.harness.report.ranks import Comparison, corrected, holm, ranks, sign_test

pytestmark = pytest.mark.fast


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


def separated(count, pairs):
    """Ranks, where the interval of a pair is normal and its test is that of its p-value."""

    def comparison(change, p):
        return Comparison(-change, p, lambda k: (-1.0, 1.0) if p * k > 0.05 else (0.5, 1.0) if change < 0 else (-1.0, -0.5))

    found = ranks(range(count), corrected({pair: comparison(*known) for pair, known in pairs.items()}))
    return [found[i] for i in range(count)]


@pytest.mark.parametrize("shared", [False, True], ids=["independent", "sharing tokens"])
@pytest.mark.parametrize("policies", [5, 10])
def test_of_equal_policies_none_is_told_apart_in_19_tables_of_20(policies, shared):
    rng = np.random.default_rng(policies)
    pairs = [table(policies, shared, rng) for _ in range(TABLES)]
    told_apart = sum(set(separated(policies, p)) != {(1, policies)} for p in pairs)
    assert told_apart / TABLES <= AT_MOST
    uncorrected = sum(any(p < 0.05 for _, p in found.values()) for found in pairs)
    assert uncorrected / TABLES > 3 * AT_MOST, "without a correction this would fail"


def test_what_differs_is_told_apart():
    means = [0.0, 1.0, 2.0, 2.01, 5.0]
    pairs = {(i, j): (means[i] - means[j], p_value((means[i] - means[j]) / 0.1)) for i in range(5) for j in range(i + 1, 5)}
    assert separated(5, pairs) == [(1, 1), (2, 2), (3, 4), (3, 4), (5, 5)]


def test_holm_corrects_step_by_step():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_rank_widens_by_what_is_not_known():
    told = {(0, 1): (-1.0, 1e-9)}
    assert separated(4, told) == [(1, 3), (2, 4), None, None]
    assert separated(1, {}) == [None]


def test_an_interval_is_that_of_its_step_of_holms_procedure():
    """With four pairs, the smallest p is tested among 4, the next among 3; the first that fails stops the others, too."""
    asked = {}

    def comparison(name, p):
        return Comparison(1.0, p, lambda k: (asked.setdefault(name, k) and 0.1, 2.0))

    pairs = {(0, i): comparison(i, p) for i, p in enumerate((0.001, 0.02, 0.03, 0.01), start=1)}
    changes = corrected(pairs)
    assert asked == {1: 4, 4: 3, 2: 2, 3: 1}
    assert [changes[0, i].sign for i in range(1, 5)] == [1, 1, 1, 1]
    asked.clear()
    changes = corrected({**pairs, (0, 2): comparison(2, 0.03)})
    assert asked == {1: 4, 4: 3, 2: 2, 3: 2}
    assert [changes[0, i].sign for i in range(1, 5)] == [1, 0, 0, 1], "extended to 0, as the test finds nothing"


def test_without_an_interval_nothing_is_told():
    changes = corrected({(0, 1): Comparison(1.0, None, lambda _: None), (0, 2): Comparison(1.0, 1e-9, lambda _: (0.5, 2.0))})
    assert (changes[0, 1].low, changes[0, 1].sign, changes[0, 2].sign) == (None, 0, 1)


def test_the_sign_test_counts_signs():
    assert sign_test(6, 0) == 2 / 2**6
    assert sign_test(1, 1) == 1.0
    assert sign_test(9, 1) == 2 * 11 / 2**10
    assert sign_test(0, 0) == 1.0
