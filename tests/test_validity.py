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
        found = validity.agreement(
            validity.in_common([source(validity, [published] * 2)], ours(validity, {k: sign * v for k, v in published.items()}))
        )
        assert (found.tables, found.policies, found.tau, found.rho) == (2, 6, sign, pytest.approx(sign))
        assert found.tau_interval == (sign, sign)


def test_scores_that_are_noise_have_an_interval_around_0(validity):
    published = dict(zip(NAMES, range(6), strict=True))
    found = validity.agreement(
        validity.in_common([source(validity, [published])], ours(validity, dict.fromkeys(NAMES, 0.5), noise=0.1))
    )
    assert np.isnan(found.tau)
    assert found.tau_interval[0] < -0.3
    assert found.tau_interval[1] > 0.3


def test_only_the_rule_that_was_run_counts(validity):
    published = {"window": 1.0, "h2o": 2.0, "tova": 3.0}
    task = ours(validity, published)
    assert len(validity.in_common([source(validity, [published])], task)[0]) == 3
    assert validity.in_common([source(validity, [published], {"tova": {"name": "tova", "variant": "kvpress"}})], task) == []


def test_a_source_agrees_with_itself_as_its_tables_do(validity):
    up, down = {"window": 1.0, "h2o": 2.0, "tova": 3.0}, {"window": 3.0, "h2o": 2.0, "tova": 1.0}
    assert validity.among_themselves(source(validity, [up, up])) == 1
    assert validity.among_themselves(source(validity, [up, down])) == -1
    assert validity.among_themselves(source(validity, [up])) is None


def test_the_page_names_the_best_task_and_those_that_mislead(validity):
    published = dict(zip(NAMES, range(6), strict=True))
    good = ours(validity, published)
    bad = validity.Ours(
        "small",
        "misleading",
        "unseen",
        *[ours(validity, {k: -v for k, v in published.items()}).__dict__[k] for k in ("records", "draws")],
    )
    text = validity.page([source(validity, [published])], [bad, good])
    assert "1 of 2 tasks order policies surely more alike than by chance; best is a task." in text
    assert "Surely the other way round: misleading." in text
    assert "| small | a task | 1 | 6 | +1.00 [+1.00, +1.00]" in text


def test_every_published_policy_is_one_of_ours(validity):
    for one in validity.published():
        assert one.question in ("seen", "unseen")
        assert len(one.tables) > 0
        for name in {name for scores in one.tables for name in scores}:
            rule = one.rules.get(name, name)
            given = {} if isinstance(rule, str) else {k: v for k, v in rule.items() if k != "name"}
            assert policy_from(rule if isinstance(rule, str) else rule["name"], given) is not None
