"""Ranks and intervals of right answers: equal policies are told apart in at most 5 % of tables; a stream is one unit."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from factories import cell_record, record

from kvbench.harness.core.intervals import Interval, wilson
from kvbench.harness.report.compare import differences
from kvbench.harness.report.ranks import answer_comparison, corrected, outcome_comparison, pair_changes, ranks, sign_test
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import answers, paired_shares
from kvbench.harness.tasks.common.answers import about_intervals, percent_or_status

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
        return compared(p, lambda k: (-1.0, 1.0) if p * k > 0.05 else (0.5, 1.0) if change < 0 else (-1.0, -0.5))

    rows = [SimpleNamespace(id=str(i), settings_key=str(i)) for i in range(count)]
    known = {(rows[i].id, rows[j].id): comparison(*pair) for (i, j), pair in pairs.items()}
    changes = pair_changes(rows, lambda a, b: known.get((a.id, b.id)))
    return [*ranks([row.id for row in rows], changes).values()]


def compared(p, ends):
    """An interval that has these ends as one of a number of intervals."""
    return Interval(0.0, *(ends(1) or (None, None)), 1, 20, p, lambda k: Interval(0.0, *ends(k), 1, 20))


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


def test_a_rank_widens_by_what_is_not_known():
    told = {(0, 1): (-1.0, 1e-9)}
    assert separated(4, told) == [(1, 3), (2, 4), None, None]
    assert separated(1, {}) == [None]


def test_an_interval_is_that_of_its_step_of_holms_procedure():
    """With four pairs, the smallest p is tested among 4, the next among 3; the first that fails stops the others, too."""
    asked = {}

    def comparison(name, p):
        return Interval(1.0, 0.1, 2.0, 1, 20, p, lambda k: Interval(1.0, asked.setdefault(name, k) and 0.1, 2.0, 1, 20))

    pairs = {(0, i): comparison(i, p) for i, p in enumerate((0.001, 0.02, 0.03, 0.01), start=1)}
    changes = corrected(pairs)
    assert asked == {1: 4, 4: 3, 2: 2, 3: 1}
    assert [changes[0, i].sign for i in range(1, 5)] == [1, 1, 1, 1]
    asked.clear()
    changes = corrected({**pairs, (0, 2): comparison(2, 0.03)})
    assert asked == {1: 4, 4: 3, 2: 2, 3: 2}
    assert [changes[0, i].sign for i in range(1, 5)] == [1, 0, 0, 1], "extended to 0, as the test finds nothing"


def test_without_an_interval_nothing_is_told():
    changes = corrected({(0, 1): compared(None, lambda _: None), (0, 2): compared(1e-9, lambda _: (0.5, 2.0))})
    assert (changes[0, 1].low, changes[0, 1].sign, changes[0, 2].sign) == (None, 0, 1)


def test_the_sign_test_counts_signs():
    assert sign_test(6, 0) == 2 / 2**6
    assert sign_test(1, 1) == 1.0
    assert sign_test(9, 1) == 2 * 11 / 2**10
    assert sign_test(0, 0) == 1.0


def quiz(outcomes: str, streams: int, **changes):
    right = outcomes.count("1")
    metrics = {"questions": len(outcomes), "right": right, "accuracy": right / len(outcomes), "outcomes": outcomes}
    data = record().data.as_json() | {"streams": streams}
    return cell_record(metrics, task={"name": "streameval", "distance": 5}, data=data, **changes)


def test_too_few_streams_have_no_interval_however_many_questions():
    few = quiz("10" * 190, 19)
    assert answers([few]).ends is None
    assert percent_or_status(few) == "50.0"
    assert about_intervals([few]) == "no interval (too few streams for an interval: 19 of 20)"
    low, high = answers([quiz("10" * 200, 20)]).ends
    assert low < 0.5 < high


def test_streams_that_are_right_or_wrong_as_a_whole_count_as_one_question_each():
    low, high = answers([quiz(("1" * 10 + "0" * 10) * 15, 30)]).ends
    alone, apart = wilson(15, 30), wilson(150, 300)
    assert high - low == pytest.approx(alone[1] - alone[0], rel=0.1)
    assert high - low > 2.5 * (apart[1] - apart[0])


def test_differences_are_over_streams_too():
    a, b = "1000" * 100, "1110" * 100
    assert outcome_comparison(a, b, None).ends == paired_shares(a, b)
    (found,) = [d for d in differences(quiz(a, 4), quiz(b, 4, policy="window")) if d.metric == "accuracy"]
    assert (found.low, found.verdict, found.why) == (None, "can't tell", "too few streams for an interval: 4 of 20")
    half = "1000" * 50 + "1110" * 50  # half of the streams gain all
    (found,) = [d for d in differences(quiz(a, 20), quiz(half, 20, policy="window")) if d.metric == "accuracy"]
    low, high = paired_shares(a, half)
    assert found.low < found.change < found.high
    assert found.high - found.low > 2 * (high - low)
    assert found.why == "stream by stream"


def test_only_streams_tell_policies_apart():
    def lost(a, b, streams):
        found = answer_comparison(Row([quiz(b, streams)]), Row([quiz(a, streams)]))
        return found.mean, found.p

    a, b = "1000" * 100, "1110" * 100
    assert lost(a, b, 4) == (0.5, None)
    assert lost(a, b, 20) == (0.5, 2 / 2**20)
    one_stream = "0" * 20 * 19 + "1" * 20  # 20 right answers more, all of one stream
    assert lost("0" * 400, one_stream, 20) == (0.05, 1.0)
    assert lost("0" * 400, one_stream, 400)[1] < 1e-5


def test_a_question_with_a_cache_of_its_own_is_independent():
    assert answers([quiz("10" * 20, 40)]).ends == wilson(20, 40)
    assert about_intervals([quiz("10" * 20, 40)]) == "95 % Wilson intervals"


def test_records_of_the_same_streams_have_no_more_streams_together():
    """Every distance asks about the same lines."""
    found = answers([quiz("10" * 50, 25), quiz("01" * 50, 25)])
    assert (found.right, found.questions, len(found.streams)) == (100, 200, 25)
    assert answers([quiz("10" * 50, 10), quiz("01" * 50, 10)]).ends is None
