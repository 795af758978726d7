"""From Python to a paper: frames, LaTeX and figures have the numbers of the feed, and of the page's comparison."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from stored import RECORDS
from test_closing import measured

from kvbench import compare, load_records, losses
from kvbench.harness.report import feed
from kvbench.harness.report.doubts import with_doubts

ROOT = Path(__file__).parents[1]
LOST = {"value": "loss", "low": "low", "high": "high", "to_name": "reference"}


@cache
def published():
    return feed.feed(load_records(RECORDS / "budget.jsonl"))["questions"]


@pytest.fixture(scope="module")
def records():
    return load_records(RECORDS / "budget.jsonl")


@pytest.fixture(scope="module")
def frame(records):
    return losses(records)


def all_rows():
    return [
        row
        for question in published()
        for row in [*(row for budget in question["budgets"] for row in budget["rows"]), *question["references"]]
    ]


def test_the_frame_has_every_row_of_the_feed_with_its_figures(frame):
    assert len(frame) == len(all_rows())
    for (_, made), row in zip(frame.iterrows(), all_rows(), strict=True):
        assert [made.policy, made.kind, made.status] == [row["name"], row["kind"], row["status"]]
        for name in ("perplexity", "kv_bytes", "kv_share", "ms"):
            assert same(made[name], row[name]), name
        assert same(made.capacity, row["capacity"])
        assert all(map(same, (made.best_rank, made.worst_rank), row["rank"] or (None, None)))
        assert all(same(made[column], (row["loss"] or {}).get(key)) for key, column in LOST.items())
        right = row["answers"][0]["share"] if row["answers"] and made.unit == "points" else None
        assert same(made.right, None if right is None else 100 * right)


def same(value, other) -> bool:
    return pd.isna(value) if other is None else value == other


def test_a_comparison_has_the_intervals_of_the_page(records):
    """Which are corrected for all pairs of the budget."""
    at_64 = [r for r in records if r.cell.capacity == 64 and r.cell.task.name == "perplexity"]
    compared = 0
    for question in feed.feed(with_doubts(at_64))["questions"]:
        for budget in question["budgets"]:
            names = [row["name"] for row in budget["rows"]]
            for (first, second), ends in zip(itertools.combinations(names, 2), budget["pairs"], strict=True):
                if second == "h2o":
                    made = compare(at_64, "h2o", first)
                    (made,) = made[made.subject == question["subject"]][["loss", "low", "high"]].to_numpy()
                    assert list(made) == pytest.approx([100 * math.expm1(x) for x in ends], rel=1e-3, abs=1e-2)
                    compared += 1
    assert compared > 1


def test_a_name_is_that_of_a_row_or_of_a_policy():
    seeds = [measured("random", 2.0 + seed / 10, parameters={"sinks": seed}) for seed in (1, 2)]
    both = [measured("dense", 1.9, None), *seeds, measured("h2o", 2.05)]
    every = compare(both, "random", "h2o")
    assert [*every.policy] == ["random (sinks 1)", "random (sinks 2)"]
    one = compare(both, "random (sinks 2)", "h2o")
    assert [*one.policy] == ["random (sinks 2)"]
    assert [*one.verdict] == ["worse"]
    back = compare(both, "h2o", "random (sinks 2)")
    assert [*back.verdict] == ["better"]
    assert back.interval[0].startswith("-")
    assert back.interval[0].isascii(), "pdfLaTeX has no minus sign"
    assert (1 + one.loss[0] / 100) * (1 + back.loss[0] / 100) == pytest.approx(1)
    other = measured("h2o", 2.1, parameters={"window": 4})
    assert {*compare([*both, other], "h2o", "dense").policy} == {"h2o"}, "where a row has exactly that name"
    assert [*compare(both, "dense", "h2o").capacity] == [8], "of the cache, for a reference has none"
