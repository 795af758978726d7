"""Intervals: the block length of the literature, honest coverage, and silence where a text is too short."""

from __future__ import annotations

import numpy as np
import pytest

from harness.report import intervals
from harness.report.intervals import clustered, data_driven_block, interval


def autoregressive(n: int, a: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=n + 200)
    x = np.zeros(n + 200)
    for i in range(1, len(x)):
        x[i] = a * x[i - 1] + noise[i]
    return x[200:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(8))
def test_the_block_length_equals_that_of_the_package_arch(seed):
    from arch.bootstrap import optimal_block_length

    draw = np.random.default_rng(seed)
    x = autoregressive(int(draw.integers(100, 3000)), float(draw.uniform(0, 0.95)), seed)
    assert data_driven_block(x) == pytest.approx(float(optimal_block_length(x)["circular"].iloc[0]), rel=1e-9)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """AR(1), the mean is 0: 95 % intervals of dependent data, where single tokens would cover some 60 %."""
    hits = 0
    for seed in range(100):
        x = autoregressive(1500, 0.7, seed)
        found = interval(x, np.ones_like(x), 1, 0)
        assert found.low is not None
        assert found.high is not None
        hits += found.low < 0 < found.high
    assert 86 <= hits <= 99


def test_a_block_is_at_least_twice_the_capacity():
    x = np.random.default_rng(0).normal(size=4000)
    assert interval(x, np.ones_like(x), 32, 1000).block >= 2000


def test_fewer_than_20_blocks_give_no_interval():
    x = np.random.default_rng(0).normal(size=390)
    assert interval(x, np.ones_like(x), 1, 10).low is None
    assert interval(x, np.ones_like(x), 1, 5).low is not None
    assert intervals.FEWEST_BLOCKS == 20


def test_the_mean_is_over_tokens_not_over_runs():
    found = interval(np.array([10.0, 1.0]), np.array([10.0, 1.0]) * 2, 1, 0)
    assert found.mean == 0.5


def test_over_many_texts_whole_texts_are_resampled():
    """Texts that differ from each other make the interval as wide as their spread, however long each is."""
    draw = np.random.default_rng(0)
    means = draw.normal(size=40)
    found = clustered(means * 1000, np.full(40, 1000.0))
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 * means.std() / 40**0.5, rel=0.15)
