"""Tables: ranks, one machine in a row, failures in a word; and published figures beside ours."""

import numpy as np
import pytest
from factories import cell_record, changed, edit, record

from kvbench.harness.report import paper
from kvbench.harness.report.doubts import faults
from kvbench.harness.report.feed import feed
from kvbench.harness.report.rows import rows, without_seeds
from kvbench.harness.report.sections import section


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
    metrics = {"step_ms": float(np.median(rounds)), "rounds_ms": list(rounds), "together": together}
    found = cell_record(metrics, policy=policy, capacity=capacity, task={"name": "latency", "batch": 1, "tokens": 64})
    return edit(found, facts=facts)


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
        "small": None,
        "good": [1, 2],
        "alike": [1, 2],
        "bad": [3, 3],
        "dense": None,
    }


def test_a_policy_that_can_be_compared_with_none_has_no_rank_and_comes_last():
    """Random, with a perplexity of e^3.6, once ranked above h2o, because no policy was known to be better."""
    found = ranked([alone("random", 8, 3.6), *four()[1:3]])
    assert list(found.items()) == [("good", [1, 2]), ("bad", [2, 3]), ("random", None)]
    assert list(ranked([alone("unknown", 8, 1.0), *four()[1:3]])) == ["good", "bad", "unknown"]


def test_no_row_joins_two_devices():
    quality = [made(p, 8, nll, 640, facts={"device": "CPU 1"}) for p, nll in (("good", 2.0), ("bad", 2.2))]
    times = [step(p, [1.0] * 6, device="CPU 2") for p in ("good", "bad")]
    here = [made(p, 16, nll, 1280, facts={"device": "CPU 2"}) for p, nll in (("good", 2.0), ("bad", 2.2))]
    first, second = feed([*quality, *times, *here])["questions"]
    for question, machine, capacity in ((first, "CPU 1", 8), (second, "CPU 2", 16)):
        assert question["machine"] == machine
        assert [budget["capacity"] for budget in question["budgets"]] == [capacity]
        assert all(row["ms"] is None for row in question["budgets"][0]["rows"])


def test_quality_of_two_devices_is_one_question():
    parts = [made(p, 8, nll, 640, facts={"device": d}) for p, nll, d in (("good", 2.0, "CPU 2"), ("bad", 2.2, "CPU 1"))]
    (question,) = feed(parts)["questions"]
    assert question["machine"] == "CPU 1 and CPU 2"
    assert [row["policy"] for row in question["budgets"][0]["rows"]] == ["good", "bad"]


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


@pytest.mark.parametrize(("task", "axis", "values"), [("streameval", "distance", (2, 20)), ("lm_eval", "tasks", ("one", "two"))])
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


def test_failures_have_names():
    oom = record("x", 8, status="failed", error={"kind": "out of memory", "message": "x"}, metrics={})
    error = {"kind": "MeasurementError", "message": "NLL is not finite at 5"}
    nan = record("y", 8, status="failed", error=error, metrics={})
    flagged = made("z", 8, 2.0, 640)
    edit(flagged, metrics={"flags": ["unsettled"]})
    found = rows([oom, nan, flagged])
    assert [faults(r, found) for r in found] == [
        ["perplexity failed: out of memory"],
        ["perplexity failed: NaN: NLL is not finite at 5"],
        ["unsettled"],
    ]


def test_seeds_of_a_policy_are_pooled_and_its_formats_are_not():
    kv = {"codec": "int8", "group": 32, "exempt": {"sinks": 0, "recent": 0}}
    records = [changed(record(), cell=cell) for cell in ({"seed": 0}, {"seed": 1}, {"kv": kv})]
    assert without_seeds(records) == [records[:2], records[2:]]


def sink(sinks: int, perplexity: float, **changes):
    what = {
        "suite": "sinks-pythia",
        "model": "EleutherAI/pythia-12b",
        "policy": "sink_window",
        "capacity": 2048,
        "parameters": {"sinks": sinks, "window": 2048 - sinks},
        "task": {"name": "perplexity", "tokens": 400000},
    }
    return cell_record({"perplexity": perplexity}, **(what | changes))


def test_ours_stands_in_its_cell_with_the_difference():
    page = paper.render([sink(0, 22.702), sink(4, 12.09)]).text
    row = next(line for line in page.splitlines() if line.startswith("| Pythia-12B (2048)"))
    assert "*21.62* → **22.7** (+5.0 %)" in row
    assert "*12.09* → **12.09** (+0.0 %)" in row
    assert row.count("**") == 4
    assert "Not measured: 18 of 20 cells. `bench run sinks`; `bench run sinks-pythia`" in page
    assert "Ours: a device." in page


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": 1024},
        {"positions": "stream"},
        {"task": {"name": "perplexity", "tokens": 4000}},
    ],
    ids=str,
)
def test_another_cell_is_not_taken_for_the_papers(changes):
    page = paper.render([sink(4, 1.2345, **changes)]).text
    row = next(line for line in page.splitlines() if line.startswith("| Pythia-12B (2048)"))
    assert "1.23" not in row


def test_a_failed_cell_and_other_models_are_shown_as_such():
    failed = sink(4, 1.0)
    failed = edit(failed, status="failed", error={"kind": "out of memory", "message": "x"}, without=["perplexity"])
    page = paper.render([failed, sink(1, 58.25, model="<b>mine</b>")]).text
    assert "**failed**: out of memory" in page
    assert "58.25" in page
    assert "<b>" not in page


def test_latency_ratios_are_of_ours_and_never_against_dense():
    what = {"suite": "latency", "model": "random:llama-2-13b", "capacity": 4096, "task": {"name": "latency", "batch": 1}}
    slow = cell_record({"step_ms": 200.0}, policy="recompute_window", parameters={}, **what)
    fast = cell_record({"step_ms": 10.0}, policy="sink_window", parameters={"sinks": 4}, **what)
    page = paper.render([slow, fast]).text
    row = next(line for line in page.splitlines() if "Llama-2-13B: recompute / sink + window" in line)
    assert "*22.22* → **20** (-10.0 %)" in row
