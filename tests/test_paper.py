"""Published figures are quoted as printed and shown beside our result for the same cell, if there is one."""

from __future__ import annotations

import pytest
from factories import cell_record, edit

from kvbench.harness.report import paper


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
        {"seed": 1},
        {"task": {"name": "perplexity", "tokens": 4000}},
        {"task": {"name": "perplexity", "tokens": 400000, "newlines": 4}},
        {"policy": "window"},
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
