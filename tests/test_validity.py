"""docs/validity.md: rank correlations between our tasks and published tables."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import beta, chi2, friedmanchisquare, kendalltau, spearmanr

from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.records.metrics import NllMetrics

DOCS = Path(__file__).parents[1] / "docs"
NAMES = ["window", "h2o", "tova", "knorm", "keydiff", "snapkv"]
CAPACITY = 64


@pytest.fixture(scope="module")
def validity():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module("validity")


@pytest.fixture(scope="module")
def agree(validity):
    return sys.modules["rank_agreement"]


def record_of(rule, positions="cache"):
    """A record's cell, as far as it is read here."""
    name, given = (rule, {}) if isinstance(rule, str) else (rule["name"], {k: v for k, v in rule.items() if k != "name"})
    parameters = parameters_of(policy_from(name, given).bind(CAPACITY))
    return SimpleNamespace(
        cell=SimpleNamespace(policy=name, parameters=parameters, capacity=CAPACITY, positions=positions, seed=0)
    )


def source(validity, tables, rules=None, question="unseen", origin="a paper"):
    return validity.Source("a source", origin, "Table 1", "a benchmark", question, rules or {}, tables)


def answers(right, count=100):
    """Which questions each policy answers: the first so many."""
    return np.array([np.arange(count) < number for number in right], float)


def ours(validity, agree, right, question="unseen", task="a task", rules=None):
    """A task in which policies answer so many of 100 questions."""
    units = answers(right.values())
    records = [record_of((rules or {}).get(name, name)) for name in right]
    return validity.Ours("small", task, question, records, agree.Scores(units, agree.drawn(units, answers=True)))


def table_of(agree, scores, policies=None, origin="a paper"):
    return agree.Table(origin, tuple(policies or range(len(scores))), tuple(scores))


def scores_of(agree, right, count=100):
    units = answers(right, count)
    return agree.Scores(units, agree.drawn(units, answers=True))


@pytest.fixture(scope="module")
def models(validity):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module("model_agreement")


def test_two_models_are_compared_task_by_task_over_the_policies_of_both(validity, agree, models):
    small = ours(validity, agree, dict(zip(NAMES, (0, 20, 40, 60, 80, 100), strict=True)))
    swapped = ours(validity, agree, dict(zip(NAMES[:5], (0, 20, 40, 80, 60), strict=True)))
    other = ours(validity, agree, dict.fromkeys(NAMES, 50), task="another task")
    (pair,) = models.pairs([small], [swapped, other])
    assert (pair.policies, pair.tau) == (5, pytest.approx(0.8))
    assert pair.p == pytest.approx(5 / 120)  # the right order, and the four in which two neighbours are swapped
    (itself,) = models.pairs([swapped], [swapped])
    assert itself.p == pytest.approx(1 / 120)
    assert models.section([pair], [itself])[2] == "| small | small | a task | unseen | 5 | +0.80 | +1.00 | 0.0417 | 0.042 |"


def test_a_policy_is_the_same_at_another_capacity(models):
    """H2O's window is half of its capacity, so bound parameters differ."""
    cells = []
    for capacity in (64, 128):
        bound = parameters_of(policy_from("h2o", {}).bind(capacity), recorded=True)
        cells.append(SimpleNamespace(cell=SimpleNamespace(policy="h2o", parameters=bound, capacity=capacity)))
    assert cells[0].cell.parameters != cells[1].cell.parameters
    assert models.rule(cells[0]) == models.rule(cells[1]) != models.rule(record_of({"name": "h2o", "window": 8}))


def test_perfect_agreement_of_eleven_survives_a_correction_for_twenty(agree):
    scores = np.arange(11.0)
    value, p = agree.permutation_test(scores, scores)
    assert (value, 20 * p < 0.001) == (pytest.approx(1), True)
    assert agree.permutation_test(scores, -scores)[1] == 1
    assert agree.permutation_test(scores, np.ones(11))[1] == 1


def test_correlations_are_scipys(agree):
    draw = np.random.default_rng(1)
    a, b = (draw.integers(0, 5, (20, 8)).astype(float) for _ in "ab")
    np.testing.assert_allclose(agree.tau(a, b), [kendalltau(x, y).statistic for x, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(agree.rho(a, b), [spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)])
    assert np.isnan(agree.tau(np.ones((1, 4)), b[:1, :4])).all()
    by_lot = agree.taus_of(a[:2], b[0], agree.orders(8)[:3])
    np.testing.assert_allclose(by_lot, [[kendalltau(x, b[0][lot]).statistic for lot in agree.orders(8)[:3]] for x in a[:2]])


def test_the_test_of_noise_is_friedmans_and_of_answers_cochrans(agree):
    draw = np.random.default_rng(2)
    for units in (draw.normal(size=(5, 40)), draw.integers(0, 2, (4, 60)).astype(float)):
        assert agree.friedman(units) == pytest.approx(friedmanchisquare(*units).pvalue)
    right = draw.integers(0, 2, (3, 50)).astype(float)
    by_policy, by_question = right.sum(1), right.sum(0)
    q = 2 * (3 * (by_policy**2).sum() - right.sum() ** 2) / (3 * right.sum() - (by_question**2).sum())
    assert agree.friedman(right) == pytest.approx(chi2.sf(q, 2))
    assert agree.friedman(np.ones((3, 10))) == 1


def test_the_same_order_is_1_and_the_reverse_is_minus_1(agree):
    for sign in (1, -1):
        published = table_of(agree, [sign * score for score in range(6)])
        right = scores_of(agree, [0, 200, 400, 600, 800, 1000], 1000)
        found = agree.agreement(right, [published] * 2)
        assert (found.tables, found.origins, found.policies) == (2, 1, 6)
        assert (found.tau, found.rho) == (pytest.approx(sign), pytest.approx(sign))
        assert found.tau_interval == pytest.approx((sign, sign))
        p = agree.chance(right, [published] * 2, found.tau)
        assert p < 0.02 if sign == 1 else p == 1


def test_three_policies_in_order_may_be_luck(agree):
    right, published = scores_of(agree, [0, 40, 80]), table_of(agree, [1.0, 2.0, 3.0])
    found = agree.agreement(right, [published])
    assert found.tau == pytest.approx(1)
    assert agree.chance(right, [published], found.tau) == pytest.approx(1 / 6)  # one of six orders


def test_a_table_counts_only_where_our_scores_differ_by_more_than_noise(agree):
    """Of 100 questions, 2, 2, 1 and 0 right is noise, even if it is the published order."""
    published = table_of(agree, [4.0, 3.0, 2.0, 1.0])
    assert agree.agreement(scores_of(agree, [2, 2, 1, 0]), [published]) is None
    assert agree.agreement(scores_of(agree, [60, 40, 20, 0]), [published]).tables == 1


def test_noise_is_that_of_the_policies_of_the_table(agree):
    """A policy that is not in the table doesn't make the others differ."""
    right = scores_of(agree, [2, 2, 1, 90])
    found = agree.agreement(right, [table_of(agree, [3.0, 2.0, 1.0], [0, 1, 2]), table_of(agree, [1.0, 2.0, 3.0], [1, 2, 3])])
    assert found.tables == 1


def test_lots_decide_anew_which_tables_count(agree):
    """Only a table that has the one good policy counts, so a lot that gives its score to another may make another count."""
    units = np.array([np.roll(row, 10 * i) for i, row in enumerate(answers([2, 90, 4, 3, 1, 0]))])
    right = agree.Scores(units, agree.drawn(units, answers=True))
    tables = [table_of(agree, [1.0, 3.0, 2.0], [0, 1, 2]), table_of(agree, [1.0, 4.0, 3.0, 2.0], [0, 3, 4, 5])]
    found = agree.agreement(right, tables)
    assert (found.tables, found.tau) == (1, pytest.approx(1))
    first, second = (
        1 / 6 * 1 / 2,
        1 / 6 * 1 / 6,
    )  # the good one at its place and the others in order; were it the first alone: 1 / 6
    assert agree.chance(right, tables, found.tau) == pytest.approx(first + second, abs=0.01)


def test_none_right_of_a_hundred_is_not_certain(agree):
    units = answers([0, 2])
    none, two = agree.drawn(units, answers=True)
    assert (none[0], two[0]) == (0, 0.02)
    assert none[1:].min() > 0
    assert np.percentile(none[1:], 97.5) == pytest.approx(beta.ppf(0.975, 0.5, 100.5), rel=0.3)
    assert 0.01 < (none[1:] > two[1:]).mean() < 0.2


def test_our_noise_widens_the_interval(agree):
    published = table_of(agree, range(6))
    few, many = (
        agree.agreement(scores_of(agree, [n * count // 100 for n in (30, 34, 38, 42, 46, 50)], count), [published])
        for count in (100, 100_000)
    )
    assert many.tau_interval == pytest.approx((1, 1))
    assert few.tau == pytest.approx(1)
    assert few.tau_interval[0] < 0.5


def test_streams_of_text_are_drawn_with_replacement(agree):
    units = np.random.default_rng(0).normal([[0.0], [3.0]], size=(2, 50))
    draws = agree.drawn(units, answers=False)
    np.testing.assert_allclose(draws[:, 0], units.mean(1))
    np.testing.assert_allclose(draws[:, 1:].std(1), units.std(1) / 50**0.5, rtol=0.1)


def test_streams_give_the_perplexity_of_the_record(validity):
    """One score for each stream of text, whose mean is the record's."""
    task = next(task for task in validity.measured() if task.task == "perplexity")
    assert task.scores.units.shape == (len(task.records), 128)
    np.testing.assert_allclose(
        task.scores.units.mean(1), [-record.measured(NllMetrics).nll for record in task.records], rtol=1e-6
    )


def test_tables_of_one_paper_are_one(agree):
    """Ten tables of a paper weigh as much as one of another, and the interval draws papers."""
    right, up = scores_of(agree, [0, 200, 400, 600, 800, 1000], 1000), range(6)
    tables = [table_of(agree, up)] * 10 + [table_of(agree, [-x for x in up], origin="another")]
    found = agree.agreement(right, tables)
    assert (found.tables, found.origins) == (11, 2)
    assert found.tau == pytest.approx(0)
    assert found.tau_interval == pytest.approx((-1, 1))
    one = agree.agreement(right, [table_of(agree, up), table_of(agree, [-x for x in up])])
    assert one.tau_interval == pytest.approx((0, 0))  # tables of one paper are not drawn


def test_only_the_rule_that_was_run_counts(validity, agree):
    """Every parameter must be the same, those that aren't written as well."""
    right = {"window": 0, "h2o": 40, "tova": 80}
    published = {name: float(score) for name, score in right.items()}
    task = ours(validity, agree, right)
    assert len(validity.in_common([source(validity, [published])], task)[0].policies) == 3
    assert validity.in_common([source(validity, [published], {"tova": {"name": "tova", "variant": "kvpress"}})], task) == []
    for rule in ({"name": "h2o", "window": 0}, {"name": "h2o", "window": 8}, {"name": "h2o", "normalise": "visible"}):
        other = ours(validity, agree, right, rules={"h2o": rule})
        assert other.index("h2o") is None, rule
        assert other.index(rule) == 1
    protected = {"name": "random", "sinks": 2, "window": 32}
    task = ours(validity, agree, {"random": 1}, rules={"random": protected})
    assert task.index("random") is None
    assert task.index(protected) == 0


def test_the_policy_inside_must_be_the_same_too(validity, agree):
    nested = {"name": "chunkkv", "score": {"name": "snapkv", "variant": "kvpress"}}
    task = ours(validity, agree, {"chunkkv": 1}, rules={"chunkkv": nested})
    assert task.index(nested) == 0
    assert task.index({"name": "chunkkv", "score": {"name": "snapkv", "variant": "paper"}}) is None
    assert task.index("chunkkv") is None


def test_records_in_stream_positions_go_before_those_in_cache(validity):
    """Published codes leave keys at their positions in the stream; a third mode is none of theirs."""
    stream, cache, other = record_of("tova", "stream"), record_of("tova"), record_of("h2o")
    clamped = record_of("window", "clamped")
    for order in ([stream, cache, other, clamped], [clamped, other, cache, stream]):
        assert validity.like_published(order) == [stream, other]


def test_a_rule_without_a_record_is_named(validity, agree):
    right = {"window": 0, "h2o": 40, "tova": 80}
    published = {name: float(score) for name, score in right.items()}
    text = validity.page([source(validity, [published], {"h2o": {"name": "h2o", "window": 8}})], [ours(validity, agree, right)])
    assert "No record has those of a source: `{name: h2o, window: 8}`, which are left out." in text
    assert "Records used: 3 in `cache`." in text


def test_a_source_agrees_with_itself_as_its_tables_do(validity):
    up, down = {"window": 1.0, "h2o": 2.0, "tova": 3.0}, {"window": 3.0, "h2o": 2.0, "tova": 1.0}
    assert validity.among_themselves(source(validity, [up, up])) == 1
    assert validity.among_themselves(source(validity, [up, down])) == -1
    assert validity.among_themselves(source(validity, [up])) is None


def test_the_page_says_what_is_shown(validity, agree):
    right = dict(zip(NAMES, (0, 20, 40, 60, 80, 100), strict=True))
    sources = [source(validity, [{name: float(score) for name, score in right.items()}])]
    good = ours(validity, agree, right)
    alike = ours(validity, agree, dict.fromkeys(NAMES, 50), task="alike")
    bad = ours(validity, agree, {name: 100 - score for name, score in right.items()}, task="misleading")
    text = validity.page(sources, [bad, alike, good])
    assert "**Shown for small's `a task`, question unseen, and no other task: it orders policies" in text
    assert "Our scores differ by no more than noise in every table: small's `alike`." in text
    assert "| small | a task | 1 of 1 | 1 | 6 | +1.00 [" in text
    assert text.index("| small | a task | 1") < text.index("| small | misleading | 1")
    none = validity.page(sources, [bad, alike])
    assert "**Not shown: no task of ours orders policies as published tables do" in none


def test_every_published_policy_is_one_of_ours(validity):
    for one in validity.published():
        assert one.question in ("seen", "unseen")
        assert len(one.tables) > 0
        for name, rule in one.policies.items():
            given = {} if isinstance(rule, str) else {k: v for k, v in rule.items() if k != "name"}
            assert policy_from(rule if isinstance(rule, str) else rule["name"], given) is not None, name


def test_tables_of_one_paper_have_one_origin(validity):
    """Sources from the same place, or named after the same paper, are one origin."""
    by_paper = defaultdict(set)
    for one in validity.published():
        by_paper[one.where.split(",")[0] if one.where.startswith("arXiv") else one.name.split(",")[0]].add(one.origin)
    assert all(len(origins) == 1 for origins in by_paper.values()), by_paper
