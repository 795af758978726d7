"""The overview: the front, significant differences, and failures in a word."""

from __future__ import annotations

import numpy as np
import pytest
from factories import cell_record, edit, record

from kvbench.harness.report import sections
from kvbench.harness.report.charts.bytes import against_bytes
from kvbench.harness.report.charts.latency import over_capacity
from kvbench.harness.report.faults import cliff, faults
from kvbench.harness.report.front import front
from kvbench.harness.report.leaderboard import render
from kvbench.harness.report.overview import overview, ranks
from kvbench.harness.report.rows import rows


def made(policy, capacity, nll, kv_bytes, **changes):
    found = record(policy, capacity, nll, **changes)
    edit(found, metrics={"kv_bytes": kv_bytes})
    return found


def four():
    return [made("dense", None, 1.9, 9000), made("good", 8, 2.0, 640), made("bad", 8, 2.2, 640), made("small", 4, 2.1, 320)]


def alone(policy, capacity, nll, **changes):
    """A record that can't be compared with others, because it scored other tokens."""
    found = made(policy, capacity, nll, 640, **changes)
    edit(found, metrics={"blocks": found.metrics.as_json()["blocks"] | {"tokens": [31] * 1024}})
    return found


def step(policy, rounds, capacity=8, together="x", **facts):
    """A latency record."""
    ms = float(np.median(rounds))
    metrics = {
        "step_ms": ms, "rounds_ms": list(rounds), "together": together, "error": 0.1, "percentiles_ms": {},
        "tokens_per_second": 1e3,
        "curve": [{"position": 64, "step_ms": ms, "error": 0.1, "used_slots": 9, "attended_slots": 9}], "first_token_ms": 1.0,
        "first_token_error": 0.1, "bookkeeping_share": 0.1, "over_roofline": 2.0, "kv_bytes": 640, "state_bytes": 64,
        "device": {"bandwidth": 1e9, "multiply_rate": 1e12},
    }  # fmt: skip
    task = {"name": "latency", "batch": 1, "tokens": 64}
    what = {"suite": "s", "model": "m", "policy": policy, "parameters": {}, "capacity": capacity, "task": task}
    found = cell_record(metrics, **what)
    edit(found, cell={"model": record().cell.as_json()["model"]})
    edit(found, facts=facts)
    return found


def starred(records):
    found = rows(records)
    return {r.cell.policy: star for r, star in zip(found, front(found), strict=True)}


def table_of(lines):
    """The rows of a table by policy, each a mapping of its columns."""
    head, _, *body = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


def test_the_front_is_who_is_not_beaten():
    assert starred(four()) == {"dense": True, "good": True, "bad": False, "small": True}
    fresh = made("recompute_window", 8, 1.5, 0)
    assert starred([*four(), fresh]) == starred(four()) | {"recompute_window": None}, "no cache, no place among caches"
    failed = record("x", 8, status="failed", error={"kind": "out of memory", "message": ""}, metrics={})
    assert starred([failed, *four()])["x"] is None


def test_a_larger_cache_has_to_be_surely_better():
    """The same NLL with more bytes earns no star, nor does one within noise; a significantly lower one does."""
    noisy = made("noisy", 8, 2.1, 640)
    noise = np.random.default_rng(5).normal(size=1024)
    edit(noisy, metrics={"blocks": noisy.metrics.as_json()["blocks"] | {"nll_sum": [32 * (2.099 + 0.1 * x) for x in noise]}})
    small = made("small", 4, 2.1, 320)
    assert starred([small, noisy]) == {"small": True, "noisy": False}
    assert starred([small, made("large", 8, 2.0, 640)]) == {"small": True, "large": True}


def test_who_can_be_told_apart_neither_in_nll_nor_bytes_nor_time_shares_the_star():
    assert starred([made("one", 8, 2.0, 640), made("two", 8, 2.0, 640)]) == {"one": True, "two": True}


def test_the_front_is_unknown_where_no_nll_can_be_compared():
    assert starred([alone("alone", 8, 36.0), *four()[1:3]]) == {"alone": None, "good": True, "bad": False}
    past = made("dense", None, 1.0, 9000, facts={"training_length": 512})
    assert starred([past, *four()[1:]])["dense"] is None, "a trend is no interval"


def test_time_counts_where_it_was_surely_measured():
    good, bad = four()[1:3]
    slow, fast, mixed = [2.0] * 12, [1.0] * 12, [1.0, 3.0] * 6
    assert starred([good, bad, step("good", slow), step("bad", fast)]) == {"good": True, "bad": True}
    assert starred([good, bad, step("good", slow), step("bad", mixed)])["bad"] is False, "now and then faster is not faster"
    assert starred([good, bad, step("good", slow), step("bad", fast, together="y")])["bad"] is False, "another sitting"
    assert starred([good, bad, step("good", slow)])["bad"] is False, "a step that was not measured is not a fast one"
    alike = made("alike", 8, 2.0, 640)
    assert starred([good, alike, step("good", slow), step("alike", fast)]) == {"good": False, "alike": True}


def test_ranks_are_shared_where_intervals_do_not_separate():
    same = made("alike", 8, 2.0, 640)
    found = rows([*four(), same])
    assert dict(zip([r.cell.policy for r in found], ranks(found), strict=True)) == {
        "dense": None, "good": (1, 2), "bad": (3, 3), "small": None, "alike": (1, 2),
    }  # fmt: skip


def test_a_policy_that_can_be_compared_with_none_has_no_rank_and_comes_last():
    """Random, with a perplexity of e^3.6, once ranked above h2o, because no policy was known to be better."""
    lines = overview([alone("random", 8, 3.6), *four()[1:3]])
    shown = table_of(lines)
    assert {policy: row["rank"] for policy, row in shown.items()} == {"good": "1–2", "bad": "2–3", "random": "–"}
    assert list(shown) == ["good", "bad", "random"]
    assert shown["random"]["front"] == "–"
    assert list(table_of(overview([alone("unknown", 8, 1.0), *four()[1:3]]))) == ["good", "bad", "unknown"]


def test_what_keeps_no_cache_is_not_the_cheapest():
    shown = table_of(overview([*four(), made("recompute_window", 8, 1.5, 0)]))
    assert shown["recompute\\_window"]["K/V"] == "–"
    assert shown["recompute\\_window"]["front"] == ""
    assert shown["recompute\\_window"]["rank"] == "–", "it is what caches are compared with"
    assert shown["good"]["K/V"] == "640 B"


def test_no_row_joins_two_devices():
    quality = [made(p, 8, nll, 640, facts={"device": "CPU 1"}) for p, nll in (("good", 2.0), ("bad", 2.2))]
    times = [step(p, [1.0] * 6, device="CPU 2") for p in ("good", "bad")]
    here = [made(p, 16, nll, 1280, facts={"device": "CPU 2"}) for p, nll in (("good", 2.0), ("bad", 2.2))]
    page = render([*quality, *times, *here]).text
    first, second = page.split("On CPU 1:\n")[1].split("On CPU 2:\n")[:2]
    assert "ms/token" not in first.split("###")[0]
    assert {r["capacity"] for r in table_of(first.splitlines()[:5]).values()} == {"8"}
    assert all(bool(row["perplexity"]) != bool(row["ms/token"]) for row in table_of(second.split("###")[0].splitlines()).values())


@pytest.mark.parametrize(
    ("task", "axis", "values"),
    [
        ("streameval", "distance", (2, 20)),
        ("arc_stream", "subset", ("ARC-Easy", "ARC-Challenge")),
        ("lm_eval", "tasks", ("one", "two")),
    ],
)
def test_no_row_of_a_section_joins_two_devices(task, axis, values):
    """A row has a column for every distance, subset or task. The second device's has only those that it measured."""

    def answered(value, device):
        counts = {"questions": 40, "right": 20, "accuracy": 0.5, "in_cache": {"whole": {"questions": 40, "right": 20}}}
        scores = {"score": 0.5, "stderr": 0.1, "metric": "acc", "requests": 40, "over_capacity": 0, "kv_bytes": 640}
        made_ = cell_record(counts | scores, task={"name": task, "prompt": "stream", axis: value})
        edit(made_, facts={"device": device})
        return made_

    records = [answered(values[0], "CPU 1"), answered(values[1], "CPU 2")]
    rows_of = [line for line in sections.body(records) if isinstance(line, str) and line.startswith("| h2o")]
    assert rows_of
    assert {line.split(" | ")[0] for line in rows_of} == {"| h2o on CPU 1", "| h2o on CPU 2"}
    if task == "streameval":
        (chart,) = [c for c in sections.body(records) if not isinstance(c, str)]
        assert {v["policy"] for v in chart.spec["layer"][-1]["data"]["values"]} == {"h2o on CPU 1", "h2o on CPU 2"}
    same = sections.body([answered(v, "CPU 1") for v in values])
    assert not any("CPU" in line for line in same if isinstance(line, str)), "one device needs no name"


def test_no_table_of_times_joins_two_ways_of_timing():
    facts = {"device": "a CPU", "instructions": "AVX2"}
    quality = [made(p, 8, 2.0, 640, facts=facts | {"threads": 1}) for p in ("good", "bad")]
    two = [step("good", [1.0] * 6, threads=2, **facts), step("bad", [1.0] * 6, threads=4, **facts)]
    page = render([*quality, *two]).text
    tables = page.split("###")[0].split("On a CPU, threads ")[1:]
    assert [t[0] for t in tables] == ["2", "4"]
    timed = [[policy for policy, row in table_of(t.splitlines()[:6]).items() if row["ms/token"]] for t in tables]
    assert timed == [["good"], ["bad"]]
    same = [step(p, [1.0] * 6, threads=2, **facts) for p in ("good", "bad")]
    assert "On a CPU" not in render([*quality, *same]).text, "one machine needs no name"


def test_failures_have_names():
    oom = record("x", 8, status="failed", error={"kind": "out of memory", "message": "x"}, metrics={})
    error = {"kind": "MeasurementError", "message": "NLL is not finite at 5"}
    nan = record("y", 8, status="failed", error=error, metrics={})
    flagged = made("z", 8, 2.0, 640)
    edit(flagged, metrics={"flags": ["unsettled"]})
    found = rows([oom, nan, flagged])
    assert [faults(r, found) for r in found] == [
        ["perplexity failed: out of memory"], ["perplexity failed: NaN: NLL is not finite at 5"], ["unsettled"],
    ]  # fmt: skip


@pytest.mark.parametrize(("at", "size"), [(100, 1.0), (10, 2.0), (300, 0.8)])
def test_a_cliff_is_found_where_it_begins(at, size):
    falls, best = record("falls", 8, 2.0), record("best", 8, 2.0)
    sums = np.array(best.metrics.blocks.nll_sum)
    edit(
        falls,
        metrics={"blocks": best.metrics.as_json()["blocks"] | {"nll_sum": (sums + 32 * size * (np.arange(1024) >= at)).tolist()}},
    )
    edit(falls, metrics={"nll": falls.metrics.nll + 0.1})
    found = rows([falls, best])
    assert cliff(found[0], found) == at * 32
    assert cliff(found[1], found) is None


def test_what_is_only_worse_or_recovers_is_no_cliff():
    best = record("best", 8, 2.0)
    sums = np.array(best.metrics.blocks.nll_sum)
    for change in (0.5 * np.ones(1024), 2.0 * (np.arange(1024) < 200)):
        other = record("other", 8, 2.3)
        edit(other, metrics={"blocks": best.metrics.as_json()["blocks"] | {"nll_sum": (sums + 32 * change).tolist()}})
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
    edit(elsewhere, data={"ids_sha256": "another", "tokens": 12800})
    assert overview([*four(), elsewhere]) == [], "of two texts neither is the one to choose by"


def test_the_page_begins_with_an_answer_and_its_contents():
    page = render([*four(), cell_record({"x": 1}, suite="other", task={"name": "unheard_of"})]).text
    assert "- [s v1: m, float32](#s-v1-m-float32): 4 cells" in page
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## m, perplexity, 32,768 tokens", "## All tables", "## other v1: m, float32", "## s v1: m, float32"]


def test_pictures_are_drawn_where_there_is_something_to_see():
    assert against_bytes(four()[:3]) == []
    (made_,) = against_bytes(four())
    assert {v["what"]: v["front"] for v in made_.spec["data"]["values"]}["bad at 8"] is False

    def timed(policy, capacity, ms):
        return cell_record({"step_ms": ms}, policy=policy, capacity=capacity, task={"name": "latency", "batch": 1})

    (latency,) = over_capacity([timed("dense", None, 4.0), timed("h2o", 8, 1.0), timed("h2o", 16, 2.0)])
    line, level = latency.spec["layer"]
    assert [v["ms"] for v in line["data"]["values"]] == [1.0, 2.0]
    assert [v["ms"] for v in level["data"]["values"]] == [4.0]
    assert over_capacity([timed("h2o", 8, 1.0)]) == []
