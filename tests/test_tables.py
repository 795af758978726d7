"""Tables: ranks, one machine in a row, and failures in a word."""

from __future__ import annotations

import numpy as np
import pytest
from factories import cell_record, edit, record

from kvbench.harness.report.doubts import faults
from kvbench.harness.report.feed import feed
from kvbench.harness.report.rows import rows
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
    ms = float(np.median(rounds))
    metrics = {
        "step_ms": ms,
        "rounds_ms": list(rounds),
        "together": together,
        "error": 0.1,
        "percentiles_ms": {},
        "tokens_per_second": 1e3,
        "curve": [{"position": 64, "step_ms": ms, "error": 0.1, "used_slots": 9, "attended_slots": 9}],
        "first_token_ms": 1.0,
        "first_token_error": 0.1,
        "bookkeeping_share": 0.1,
        "over_roofline": 2.0,
        "kv_bytes": 640,
        "state_bytes": 64,
        "device": {"bandwidth": 1e9, "multiply_rate": 1e12},
    }
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
        ["perplexity failed: out of memory"],
        ["perplexity failed: NaN: NLL is not finite at 5"],
        ["unsettled"],
    ]
