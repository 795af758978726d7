"""Tables: ranks, one machine in a row, and failures in a word."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import bench
from factories import cell_record, drawn, edit, record

from kvbench.harness.records import RecordStore
from kvbench.harness.report.chart import drawing_files
from kvbench.harness.report.doubts import cliff, faults
from kvbench.harness.report.feed import feed
from kvbench.harness.report.leaderboard import render
from kvbench.harness.report.markdown import digits, in_bytes
from kvbench.harness.report.rows import rows
from kvbench.harness.report.sections import section
from kvbench.harness.report.task_charts import over_capacity


def made(policy, capacity, nll, kv_bytes, **changes):
    found = record(policy, capacity, nll, **changes)
    edit(found, metrics={"kv_bytes": kv_bytes})
    return found


@pytest.mark.parametrize(
    ("value", "two", "three"),
    [(0.004, "0.004", "0.004"), (0.5, "0.5", "0.5"), (9.96, "10", "9.96"), (99.6, "100", "99.6"), (100, "100", "100"),
     (999.7, "1,000", "1,000"), (1234, "1,234", "1,234"), (1.2e-7, "1.2e-07", "1.2e-07")],
)  # fmt: skip
def test_large_numbers_have_no_exponent(value, two, three):
    assert (digits(value, 2), digits(value, 3)) == (two, three)


def test_of_dense_is_100_percent_and_bytes_below_a_unit_have_no_exponent():
    assert "| 8.79 KiB | 100 % |" in render(feed(four())).text
    assert (in_bytes(999), in_bytes(1023), in_bytes(1024 * 999 + 800)) == ("999 B", "1023 B", "1000 KiB")


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


def table_of(lines):
    """The rows of a table by policy, each a mapping of its columns."""
    head, _, *body = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return {row[head.index("policy")]: dict(zip(head, row, strict=True)) for row in body}


def ranked(records):
    """Ranks by policy, in the order of the feed's rows; the only question of the records."""
    (question,) = feed(records)["questions"]
    found = [row for budget in question["budgets"] for row in budget["rows"]] + question["references"]
    return {row["policy"]: row["rank"] for row in found}


def test_ranks_are_shared_where_intervals_do_not_separate():
    assert ranked([*four(), made("alike", 8, 2.0, 640)]) == {
        "small": None, "good": [1, 2], "alike": [1, 2], "bad": [3, 3], "dense": None,
    }  # fmt: skip


def test_a_policy_that_can_be_compared_with_none_has_no_rank_and_comes_last():
    """Random, with a perplexity of e^3.6, once ranked above h2o, because no policy was known to be better."""
    found = ranked([alone("random", 8, 3.6), *four()[1:3]])
    assert list(found.items()) == [("good", [1, 2]), ("bad", [2, 3]), ("random", None)]
    assert list(ranked([alone("unknown", 8, 1.0), *four()[1:3]])) == ["good", "bad", "unknown"]


def test_what_keeps_no_cache_is_not_the_cheapest():
    page = render(feed([*four(), made("recompute_window", 8, 1.5, 0)])).text
    shown = table_of(page.splitlines())
    assert shown["recompute\\_window at 8"]["K/V"] == "–"
    assert shown["recompute\\_window at 8"]["rank"] == "–", "it is what caches are compared with"
    assert shown["good"]["K/V"] == "640 B"


def test_no_row_joins_two_devices():
    quality = [made(p, 8, nll, 640, facts={"device": "CPU 1"}) for p, nll in (("good", 2.0), ("bad", 2.2))]
    times = [step(p, [1.0] * 6, device="CPU 2") for p in ("good", "bad")]
    here = [made(p, 16, nll, 1280, facts={"device": "CPU 2"}) for p, nll in (("good", 2.0), ("bad", 2.2))]
    first, second = feed([*quality, *times, *here])["questions"]
    for question, machine, capacity in ((first, "CPU 1", 8), (second, "CPU 2", 16)):
        assert question["machine"] == machine
        assert [budget["capacity"] for budget in question["budgets"]] == [capacity]
        assert all(row["ms"] is None for row in question["budgets"][0]["rows"])


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
    page = section(records[0], records)
    rows_of = [line for line in page.text.splitlines() if line.startswith("| h2o")]
    assert rows_of
    assert {line.split(" | ")[0] for line in rows_of} == {"| h2o on CPU 1", "| h2o on CPU 2"}
    if task == "streameval":
        (chart,) = page.charts
        assert {v["policy"] for v in chart.spec["layer"][-1]["data"]["values"]} == {"h2o on CPU 1", "h2o on CPU 2"}
    same = [answered(v, "CPU 1") for v in values]
    assert "CPU" not in section(same[0], same).text, "one device needs no name"


def test_no_table_of_times_joins_two_ways_of_timing():
    facts = {"device": "a CPU", "instructions": "AVX2"}
    quality = [made(p, 8, 2.0, 640, facts=facts | {"threads": 1}) for p in ("good", "bad")]
    two = [step("good", [1.0] * 6, threads=2, **facts), step("bad", [1.0] * 6, threads=4, **facts)]
    asked = feed([*quality, *two])["questions"]
    assert [question["machine"] for question in asked] == ["a CPU, threads 2, AVX2", "a CPU, threads 4, AVX2"]
    timed = [[row["policy"] for row in question["budgets"][0]["rows"] if row["ms"]] for question in asked]
    assert timed == [["good"], ["bad"]]
    same = [step(p, [1.0] * 6, threads=2, **facts) for p in ("good", "bad")]
    assert [question["machine"] for question in feed([*quality, *same])["questions"]] == ["a CPU"], "one machine needs no set-up"


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


def test_the_page_is_one_screen_with_an_answer_and_a_link_for_each_question():
    records = [*four(), cell_record({"x": 1}, suite="other", task={"name": "unheard_of"})]
    made_ = feed([*records, *(record(f"p{i}", 8, 3.0 + i) for i in range(6))])
    page = render(made_).text
    (question,) = made_["questions"]
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == ["## m, perplexity, 32,768 tokens", "## All questions"]
    assert f"- [m, perplexity, 32,768 tokens](index.html#q={question['id']}), 8 tokens: good is " in page
    assert list(table_of(page.splitlines())) == ["good", "bad", "p0", "p1", "p2", "dense"], "the best, and what they refer to"
    assert "No record has a perplexity or right answers yet" in render(feed(records[-1:])).text


def test_the_table_of_a_cell_has_all_of_its_task_and_its_pictures_where_they_can_lie(tmp_path, capsys):
    store = RecordStore(tmp_path / "results")
    for one in [*drawn(), cell_record({"x": 1}, task={"name": "unheard_of"})]:
        store.write(one)
    code, out, _ = bench(capsys, "show", "table", drawn()[0].cell_id[:8], "--results", tmp_path / "results")
    assert code == 0
    assert out.startswith("## perplexity\n\ns v1: m, float32.")
    assert "<picture>" not in out
    lines = [line for line in out.split("###")[0].splitlines() if "640 B" in line]
    assert len(lines) == sum(r.metrics.kv_bytes == 640 for r in drawn())
    target = tmp_path / "new" / "table.md"
    assert bench(capsys, "show", "table", drawn()[0].cell_id[:8], "--results", tmp_path / "results", "--out", target)[0] == 0
    assert drawing_files(target.read_text()) == {p.name for p in (target.parent / "charts").iterdir()} != set()


def test_pictures_are_drawn_where_there_is_something_to_see():
    def timed(policy, capacity, ms):
        return cell_record({"step_ms": ms}, policy=policy, capacity=capacity, task={"name": "latency", "batch": 1})

    (latency,) = over_capacity([timed("dense", None, 4.0), timed("h2o", 8, 1.0), timed("h2o", 16, 2.0)])
    line, level = latency.spec["layer"]
    assert [v["ms"] for v in line["data"]["values"]] == [1.0, 2.0]
    assert [v["ms"] for v in level["data"]["values"]] == [4.0]
    assert over_capacity([timed("h2o", 8, 1.0)]) == []
