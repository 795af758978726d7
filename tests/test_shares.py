"""Questions of one stream are one unit: below 20 streams there is no interval, and no policy is better than another."""

from __future__ import annotations

import pytest
from factories import cell_record, record

from kvbench.harness.core.intervals import wilson
from kvbench.harness.report.compare import differences
from kvbench.harness.report.ranks import answer_comparison
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import answers, difference_ends, paired_shares
from kvbench.harness.tasks.common.answers import about_intervals, percent_or_status

pytestmark = pytest.mark.fast


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
    assert difference_ends(a, b, None) == paired_shares(a, b)
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
        return found.value, found.p

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
