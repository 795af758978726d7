"""Intervals: the textbook's if blocks are independent, good coverage if not, and none if a text is too short."""

import math

import numpy as np
import pytest
from factories import record
from scipy import stats
from statsmodels.tsa.stattools import acf

from kvbench.harness.core.intervals import MIN_BLOCK_TOKENS, MIN_BLOCKS, clustered, clustered_share, interval, wilson
from kvbench.harness.core.perplexity import percent_lost, perplexity
from kvbench.harness.report.pairing import nll_interval
from kvbench.lab.studies.interval_coverage import CORRELATIONS, PROCESSES, RUN, STREAMS, clusters, coverage, coverage_of_shares

pytestmark = pytest.mark.fast


SHORTEST_TEXT = MIN_BLOCKS * MIN_BLOCK_TOKENS


def ends(found):
    assert found.low is not None
    assert found.high is not None
    assert found.p is not None
    return found.low, found.high


def skewed(seed, count=40):
    """Sums over texts of unequal length, and their lengths."""
    draw = np.random.default_rng(seed)
    lengths = draw.uniform(500, 1500, size=count)
    return (draw.exponential(size=count) - 0.8) * lengths, lengths


@pytest.mark.parametrize("process", ["AR 0.99", "bursts of 64 tokens, 600 apart", "slow component, memory 256"])
def test_intervals_of_dependent_tokens_cover_the_truth_as_often_as_they_say(process):
    """The block bootstrap's percentiles cover 89, 82 and 83 % here, and show no interval for up to a quarter of the texts."""
    series = PROCESSES[process](np.random.default_rng(0), 1000, 32_768 // RUN)
    covered, shown, width = coverage(series, interval)
    assert 92.5 <= covered <= 97.5
    assert shown == 100
    assert width < 1.6


def test_of_equal_texts_without_skewness_it_is_the_t_test():
    """Values that are symmetric about their mean have no skewness."""
    half = np.random.default_rng(1).normal(size=15)
    values = np.concatenate([0.3 + half, 0.3 - half])
    found, theirs = clustered(values * 1000, np.full(30, 1000.0)), stats.ttest_1samp(values, 0)
    assert ends(found) == pytest.approx(tuple(theirs.confidence_interval()), rel=1e-9)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_skewness_shifts_the_interval_by_the_root_of_halls_polynomial(seed):
    values = np.random.default_rng(seed).exponential(size=30)
    a = stats.skew(values, bias=False) / (6 * math.sqrt(30))
    reach, error = stats.t.ppf(0.975, 29), stats.sem(values)

    def root(t):
        found = np.roots([4 / 3 * a**2, 2 * a, 1, a - t])
        return float(found[np.argmin(np.abs(found.imag))].real)

    expected = values.mean() - error * root(reach), values.mean() - error * root(-reach)
    assert ends(clustered(values, np.ones(30))) == pytest.approx(expected, rel=1e-9)
    assert abs(expected[1] - values.mean()) > abs(expected[0] - values.mean()), "rare large values may yet come"


def test_correlated_blocks_widen_the_interval_as_an_autoregressive_process_would():
    blocks = PROCESSES["slow component, memory 1,000"](np.random.default_rng(6), 1, 1280)[0].reshape(20, 64)
    correlation = float(acf(blocks.sum(1), nlags=1)[1])
    assert correlation > 0.1
    correlation += (1 + 3 * correlation) / 20  # the correction of its bias
    together = interval(blocks.ravel(), np.full(1280, 32.0), 32, 0)
    apart = clustered(blocks.sum(1), np.full(20, 2048.0))
    ratio = [(end - together.mean) / (other - apart.mean) for end, other in zip(ends(together), ends(apart), strict=True)]
    assert ratio == pytest.approx([math.sqrt((1 + correlation) / (1 - correlation))] * 2, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_the_p_value_says_what_the_interval_says(seed):
    sums, tokens = skewed(seed)
    for end in ends(clustered(sums, tokens)):
        by = 1e-9 * abs(end)
        ps = [clustered(sums - (end + shift) * tokens, tokens).p for shift in (-by, by)]
        assert min(ps) < 0.05 < max(ps)
        assert ps == pytest.approx([0.05, 0.05], rel=1e-6)


def test_p_values_are_fine_enough_to_correct_for_many_comparisons():
    sums, tokens = skewed(0)
    assert 0 < clustered(sums + 2 * tokens, tokens).p < 1e-6


def test_units_and_a_constant_change_nothing_else():
    sums, tokens = skewed(3)
    low, high = ends(clustered(sums, tokens))
    assert ends(clustered(7 * sums, tokens)) == pytest.approx((7 * low, 7 * high))
    assert ends(clustered(sums + 3 * tokens, tokens)) == pytest.approx((3 + low, 3 + high))
    assert ends(clustered(-sums, tokens)) == pytest.approx((-high, -low))


def test_whether_there_is_an_interval_depends_on_lengths_alone():
    """A choice based on the data would prefer texts in which a rare event happens not to occur."""
    runs = SHORTEST_TEXT // RUN
    for process in PROCESSES.values():
        (series,) = process(np.random.default_rng(0), 1, runs)
        assert ends(interval(series, np.full(runs, 32.0), RUN, MIN_BLOCK_TOKENS // 2))
        short = interval(series[1:], np.full(runs - 1, 32.0), RUN, 0)
        assert short.low is short.high is short.p is None
        assert short.blocks < MIN_BLOCKS


def test_a_block_is_at_least_twice_the_capacity():
    x = np.random.default_rng(0).normal(size=1280)
    found = interval(x, np.full(1280, 32.0), 32, 1024)
    assert (found.block, found.blocks) == (2048, 20)
    assert ends(found)
    short = interval(x, np.full(1280, 32.0), 32, 1025)
    assert short.low is None
    assert short.blocks < 20


def test_the_mean_is_over_tokens_not_over_runs():
    found = interval(np.array([10.0, 1.0]), np.array([10.0, 1.0]) * 2, 1, 0)
    assert found.mean == 0.5


def test_what_does_not_vary_has_an_interval_without_width():
    found = clustered(np.full(25, 3.0), np.full(25, 10.0))
    assert (found.low, found.high, found.p) == (found.mean, found.mean, 0.0)
    assert clustered(np.zeros(25), np.full(25, 10.0)).p == 1.0


def test_over_many_texts_the_interval_is_as_wide_as_they_differ():
    """Whatever their lengths."""
    draw = np.random.default_rng(0)
    means = draw.normal(size=40)
    low, high = ends(clustered(means * 1000, np.full(40, 1000.0)))
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 39) * means.std(ddof=1) / 40**0.5, rel=0.05)


def test_texts_of_unequal_length_count_as_fewer():
    """With log-normal lengths (sigma 0.8), a t interval with one degree of freedom per text covers only 88 %."""
    draw, hits = np.random.default_rng(0), 0
    for _ in range(1000):
        lengths = draw.lognormal(sigma=0.8, size=25)
        found = clustered(draw.normal(size=25) * lengths, lengths)
        hits += found.low is None or found.low < 0 < found.high
    assert hits >= 930


def test_where_one_text_outweighs_the_rest_there_is_no_interval():
    lengths = np.array([100.0] * 24 + [5000.0])
    found = clustered(np.random.default_rng(0).normal(size=25) * lengths, lengths)
    assert found.low is found.high is found.p is None
    assert 1 < found.blocks < 5


def test_a_mean_over_a_trend_has_neither_an_interval_nor_a_p_value():
    steady, trend = (nll_interval(record("dense", None, facts={"training_length": n})) for n in (100_000, 512))
    assert ends(steady)
    assert trend.low is trend.high is trend.p is None
    assert trend.mean == steady.mean


def test_the_perplexity_of_a_model_that_predicts_nothing_is_finite():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert math.isfinite(perplexity(1e4) + percent_lost(1e4))


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.97])
def test_a_share_is_covered_however_alike_the_answers_of_a_stream_are(streams, share):
    """Wilson's interval over questions covers 63 % where answers are correlated by 0.2."""
    for correlation in CORRELATIONS:
        right = clusters(np.random.default_rng(0), 1000, streams, 20, share, correlation)
        assert coverage_of_shares(right, 20, share) >= 93
    assert coverage_of_shares(right, 20, share, by_question=True) < 75


def test_of_independent_questions_in_streams_the_interval_is_nearly_wilsons():
    right = np.random.default_rng(0).binomial(10, 0.5, size=100).astype(float)
    (low, high), (least, most) = clustered_share(right, np.full(100, 10.0)), wilson(int(right.sum()), 1000)
    assert low <= least < most <= high
    assert high - low < 1.2 * (most - least)


def test_streams_that_all_agree_are_worth_one_question_each():
    """The correlation of answers within a stream is unknown."""
    low, high = clustered_share(np.full(20, 10.0), np.full(20, 10.0))
    assert high == 1
    assert low == pytest.approx(wilson(20, 20)[0], abs=0.03)


def test_where_one_stream_outweighs_the_rest_a_share_has_no_interval():
    asked = np.array([10.0] * 24 + [500.0])
    assert clustered_share(asked / 2, asked) is None
