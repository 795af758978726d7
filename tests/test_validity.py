"""docs/validity.md: rank correlations between our tasks and published tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from kvbench.harness.core.parameters import parameters_of, policy_from

FILE = Path(__file__).parents[1] / "docs" / "validity.py"
NAMES = ["window", "h2o", "tova", "knorm", "keydiff", "snapkv"]


@pytest.fixture(scope="module")
def validity():
    spec = importlib.util.spec_from_file_location("validity", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["validity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def source(validity, tables, rules=None, question="unseen"):
    return validity.Source("a paper", "Table 1", "a task", question, rules or {}, tables)


def ours(validity, scores, noise=0.0, question="unseen"):
    draw = np.random.default_rng(0)
    records = [
        SimpleNamespace(cell=SimpleNamespace(policy=name, parameters=parameters_of(policy_from(name, {})))) for name in scores
    ]
    draws = [np.concatenate([[score], score + noise * draw.normal(size=validity.DRAWS)]) for score in scores.values()]
    return validity.Ours("small", "a task", question, records, draws)


def test_the_page_is_what_the_records_and_the_published_tables_give(validity):
    assert (FILE.parent / "validity.md").read_text(encoding="utf-8") == validity.page(validity.published(), validity.measured())


def test_correlations_are_scipys(validity):
    draw = np.random.default_rng(1)
    a, b = (draw.integers(0, 5, (20, 8)).astype(float) for _ in "ab")
    np.testing.assert_allclose(validity.tau(a, b), [kendalltau(x, y).statistic for x, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(validity.rho(a, b), [spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)])
    assert np.isnan(validity.tau(np.ones((1, 4)), b[:1, :4])).all()


def test_the_same_order_is_1_and_the_reverse_is_minus_1(validity):
    published = dict(zip(NAMES, range(6), strict=True))
    for sign in (1, -1):
        task = ours(validity, {name: sign * score for name, score in published.items()})
        found = validity.agreement(validity.in_common([source(validity, [published] * 2)], task))
        assert (found.tables, found.policies, found.tau, found.rho) == (2, 6, pytest.approx(sign), pytest.approx(sign))
        assert found.tau_interval == pytest.approx((sign, sign))
        assert found.p < 0.02 if sign == 1 else found.p == 1


def test_three_policies_in_order_may_be_luck(validity):
    published = {"window": 1.0, "h2o": 2.0, "tova": 3.0}
    found = validity.agreement(validity.in_common([source(validity, [published])], ours(validity, published)))
    assert found.tau == pytest.approx(1)
    assert found.p == pytest.approx(1 / 6, abs=0.04)  # one of six orders


def test_noise_in_our_scores_widens_the_interval(validity):
    published = dict(zip(NAMES, range(6), strict=True))
    scores = {name: score / 100 for name, score in published.items()}
    noisy, sure = (
        validity.agreement(validity.in_common([source(validity, [published])], ours(validity, scores, noise=noise)))
        for noise in (0.05, 0.0001)
    )
    assert sure.tau_interval == pytest.approx((1, 1))
    assert noisy.tau == pytest.approx(1)
    assert noisy.tau_interval[0] < 0.3


def test_tables_that_differ_widen_it_too(validity):
    up, down = (dict(zip(NAMES, order, strict=True)) for order in (range(6), range(6, 0, -1)))
    found = validity.agreement(validity.in_common([source(validity, [up, up, down])], ours(validity, up)))
    assert found.tau == pytest.approx(1 / 3)
    assert found.tau_interval == pytest.approx((-1, 1))


def test_policies_that_score_alike_have_no_order(validity):
    published = dict(zip(NAMES, range(6), strict=True))
    assert (
        validity.agreement(validity.in_common([source(validity, [published])], ours(validity, dict.fromkeys(NAMES, 0.5)))) is None
    )


def test_only_the_rule_that_was_run_counts(validity):
    published = {"window": 1.0, "h2o": 2.0, "tova": 3.0}
    task = ours(validity, published)
    assert len(validity.in_common([source(validity, [published])], task).tables[0]) == 3
    assert (
        validity.in_common([source(validity, [published], {"tova": {"name": "tova", "variant": "kvpress"}})], task).tables == []
    )
    nested = {"name": "chunkkv", "score": {"name": "snapkv", "variant": "kvpress"}}
    cell = SimpleNamespace(
        policy="chunkkv", parameters=parameters_of(policy_from("chunkkv", {"score": nested["score"]}).bind(64))
    )
    bound = validity.Ours("small", "a task", "seen", [SimpleNamespace(cell=cell)], [np.zeros(1)])
    assert bound.of(nested) is not None
    assert bound.of({"name": "chunkkv", "score": {"name": "snapkv", "variant": "paper"}}) is None


def test_a_source_agrees_with_itself_as_its_tables_do(validity):
    up, down = {"window": 1.0, "h2o": 2.0, "tova": 3.0}, {"window": 3.0, "h2o": 2.0, "tova": 1.0}
    assert validity.among_themselves(source(validity, [up, up])) == 1
    assert validity.among_themselves(source(validity, [up, down])) == -1
    assert validity.among_themselves(source(validity, [up])) is None


def test_the_page_names_the_best_task(validity):
    published = dict(zip(NAMES, range(6), strict=True))
    good = ours(validity, published)
    alike, bad = (
        validity.Ours("small", name, "unseen", *(getattr(ours(validity, scores), part) for part in ("records", "draws")))
        for name, scores in (("alike", dict.fromkeys(NAMES, 0.5)), ("misleading", {k: -v for k, v in published.items()}))
    )
    text = validity.page([source(validity, [published])], [bad, alike, good])
    assert "More alike than by lot (Holm, 5 %): a task. Best is a task. The same score for all policies: alike." in text
    assert "| small | a task | 1 | 6 | +1.00 [+1.00, +1.00]" in text
    assert text.index("| small | a task | 1") < text.index("| small | misleading | 1")


def test_every_published_policy_is_one_of_ours(validity):
    for one in validity.published():
        assert one.question in ("seen", "unseen")
        assert len(one.tables) > 0
        for name in {name for scores in one.tables for name in scores}:
            rule = one.rules.get(name, name)
            given = {} if isinstance(rule, str) else {k: v for k, v in rule.items() if k != "name"}
            assert policy_from(rule if isinstance(rule, str) else rule["name"], given) is not None
