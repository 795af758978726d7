"""The overview: who is on the front, who is surely better, and what went wrong, in a word."""

from __future__ import annotations

import numpy as np
import pytest
from test_paper import cell_record
from test_records import record

from harness.report.charts.bytes import against_bytes
from harness.report.charts.latency import over_capacity
from harness.report.leaderboard import render
from harness.report.overview import cliff, front, labels, overview, ranks, rows


def made(policy, capacity, nll, kv_bytes, **changes):
    found = record(policy, capacity, nll, **changes)
    found.metrics["kv_bytes"] = kv_bytes
    return found


def four():
    return [made("dense", None, 1.9, 9000), made("good", 8, 2.0, 640), made("bad", 8, 2.2, 640), made("small", 4, 2.1, 320)]


def test_the_front_is_who_is_not_beaten_in_everything():
    assert front(rows(four())) == [True, True, False, True]
    fresh = made("recompute_window", 8, 1.5, 0)
    assert front(rows([*four(), fresh])) == [True, True, False, True, False], "no cache, no place on the front of caches"
    failed = record("x", 8, status="failed", error={"kind": "out of memory", "message": ""}, metrics={})
    assert front(rows([failed, *four()]))[0] is False


def test_time_counts_where_it_was_measured():
    def step(policy, ms):
        what = {"suite": "s", "model": "m", "policy": policy, "parameters": {}, "capacity": 8, "task": {"name": "latency"}}
        return cell_record({"step_ms": ms, "rounds_ms": [ms], "together": "x"}, **what)

    records = [*four()[1:3], step("good", 2.0), step("bad", 1.0)]
    assert front(rows(records)) == [True, True]
    assert front(rows([*four()[1:3], step("good", 2.0)])) == [True, False], "a step that was not measured is not a fast one"


def test_ranks_are_shared_where_intervals_do_not_separate():
    same = made("alike", 8, 2.0, 640)
    found = rows([*four(), same])
    assert dict(zip([r.cell["policy"] for r in found], ranks(found), strict=True)) == {
        "dense": "", "good": "1", "bad": "3", "small": "", "alike": "1",
    }  # fmt: skip


def test_a_rank_is_a_bound_where_one_rival_read_another_text():
    other = made("other", 8, 2.5, 640)
    other.data["ids_sha256"] = "another text"
    found = dict(zip(["good", "bad", "other"], ranks(rows([*four()[1:3], other])), strict=True))
    assert found == {"good": "≥ 1", "bad": "≥ 2", "other": ""}


def test_failures_have_names():
    oom = record("x", 8, status="failed", error={"kind": "out of memory", "message": "x"}, metrics={})
    error = {"kind": "MeasurementError", "message": "NLL is not finite at 5"}
    nan = record("y", 8, status="failed", error=error, metrics={})
    flagged = made("z", 8, 2.0, 640)
    flagged.metrics["flags"] = ["unsettled"]
    found = rows([oom, nan, flagged])
    assert [labels(r, found) for r in found] == [
        ["perplexity failed: out of memory"], ["perplexity failed: NaN: NLL is not finite at 5"], ["unsettled"],
    ]  # fmt: skip


@pytest.mark.parametrize(("at", "size"), [(100, 1.0), (10, 2.0), (300, 0.8)])
def test_a_cliff_is_found_where_it_begins(at, size):
    falls, best = record("falls", 8, 2.0), record("best", 8, 2.0)
    sums = np.array(best.metrics["blocks"]["nll_sum"])
    falls.metrics["blocks"] = best.metrics["blocks"] | {"nll_sum": (sums + 32 * size * (np.arange(400) >= at)).tolist()}
    falls.metrics["nll"] += 0.1
    found = rows([falls, best])
    assert cliff(found[0], found) == at * 32
    assert cliff(found[1], found) is None


def test_what_is_only_worse_or_recovers_is_no_cliff():
    best = record("best", 8, 2.0)
    sums = np.array(best.metrics["blocks"]["nll_sum"])
    for change in (0.5 * np.ones(400), 2.0 * (np.arange(400) < 200)):
        other = record("other", 8, 2.3)
        other.metrics["blocks"] = best.metrics["blocks"] | {"nll_sum": (sums + 32 * change).tolist()}
        found = rows([other, best])
        assert cliff(found[0], found) is None


def test_the_table_has_a_row_a_policy_and_the_command_that_repeats_it():
    lines = overview(four())
    assert lines[0].startswith("| policy | capacity | front | rank | perplexity | K/V |")
    row = next(line for line in lines if line.startswith("| good"))
    assert "★" in row
    assert f"`{four()[1].cell_id[:8]}`" in row
    assert overview(four()[:1]) == []
    elsewhere = record("good", 8)
    elsewhere.data = {"ids_sha256": "another", "tokens": 12800}
    assert overview([*four(), elsewhere]) == [], "of two texts neither is the one to choose by"


def test_the_page_begins_with_its_contents():
    page = render([*four(), cell_record({"x": 1}, suite="other", task={"name": "unheard_of"})]).text
    assert "- [s v1: m, float32](#s-v1-m-float32): 4 cells" in page
    assert page.count("\n## ") == 2


def test_pictures_are_drawn_where_there_is_something_to_see():
    assert against_bytes(four()[:3]) == []
    (made_,) = against_bytes(four())
    assert {v["what"]: v["front"] for v in made_.spec["data"]["values"]}["bad at 8"] is False

    def step(policy, capacity, ms):
        return cell_record({"step_ms": ms}, policy=policy, capacity=capacity, task={"name": "latency", "batch": 1})

    (latency,) = over_capacity([step("dense", None, 4.0), step("h2o", 8, 1.0), step("h2o", 16, 2.0)])
    line, level = latency.spec["layer"]
    assert [v["ms"] for v in line["data"]["values"]] == [1.0, 2.0]
    assert [v["ms"] for v in level["data"]["values"]] == [4.0]
    assert over_capacity([step("h2o", 8, 1.0)]) == []
