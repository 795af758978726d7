"""Which policy for a model: what `bench which` chooses to measure, and what it answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import bench
from factories import edit
from test_closing import answered, measured

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.report.which import which
from kvbench.harness.run import which as choosing
from kvbench.harness.run.estimate import Speeds
from kvbench.harness.run.which import Asked, plan
from kvbench.harness.suite import load

ASKED = Asked("builtin:recall", 96, 3.0, None, "cpu", "float32")


@pytest.fixture
def machine(monkeypatch):
    """Reads a given number of tokens a second under any policy."""

    def reads(tokens: float) -> None:
        monkeypatch.setattr(Speeds, "tokens_per_second", lambda self, cell, streams: tokens)

    reads(5000.0)
    return reads


def sizes(chosen: choosing.Plan) -> dict[str, int]:
    return {task["name"]: task.get("streams") or task.get("limit") for task in chosen.suite["task"]}


@pytest.mark.slow("loads a model")
def test_policies_and_sizes_fit_the_time_and_have_an_interval(machine, tmp_path):
    """Given more of it, first policies are added, then streams and questions."""
    asked = [replace(ASKED, minutes=minutes) for minutes in (1.5, 3.0, 60.0)]
    plans = [plan(one) for one in asked]
    for one, chosen in zip(asked, plans, strict=True):
        assert chosen.seconds <= 60 * one.minutes
        assert min(size for size in sizes(chosen).values() if size) >= MIN_BLOCKS
        chosen.write(tmp_path / "which.yaml", one.command)
        cells = load(tmp_path / "which.yaml")[1]
        assert {c.capacity for c in cells if c.policy.evicts} == {96}
        assert {(c.evict, c.positions) for c in cells if c.policy.evicts} == {(1, "cache"), ("prompt", "stream")}
    policies = [len({entry["name"] for entry in chosen.suite["policies"]}) for chosen in plans]
    assert policies[0] < policies[1] < policies[2] == len(choosing._policies(96))
    assert sizes(plans[2])["perplexity"] == 5 * MIN_BLOCKS
    machine(50.0)
    with pytest.raises(UserError, match=r"--minutes 3: 20 streams of 352 tokens .* under 4 policies, take about \d+ min"):
        plan(ASKED)


@pytest.mark.slow("loads a model")
def test_a_budget_that_holds_the_questions_has_others(machine, monkeypatch):
    """RULER's, whose length is an option, if lm-eval's extra for them is here; else lines of a record."""
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    lines = plan(replace(ASKED, budget=300))
    assert [task["name"] for task in lines.suite["task"]] == ["perplexity", "streameval", "latency"]
    assert lines.notes == ["Our questions have only 203 tokens: lines of a record are asked for instead."]
    monkeypatch.setattr(choosing, "find_spec", lambda name: name == "wonderwords")
    ruler = plan(replace(ASKED, budget=300)).suite["task"][1]
    assert (ruler["tasks"], ruler["max_seq_length"]) == (["niah_single_1"], 528)


@pytest.mark.slow("loads a model")
def test_what_can_not_be_answered_is_refused(machine, tmp_path):
    with pytest.raises(UserError, match=r"--budget 480: builtin:recall was trained on 528 tokens, .*; give at most 464"):
        plan(replace(ASKED, budget=480))
    (tmp_path / "short.txt").write_text("A short text.\n" * 100)
    with pytest.raises(UserError, match=r"tokens of text, not the 7040 asked for; .*leave out --data"):
        plan(replace(ASKED, data=str(tmp_path)))


def test_a_budget_is_a_number_of_tokens(capsys):
    for given in ("25%", "0", "64MiB"):
        code, _, err = bench(capsys, "which", "builtin:recall", "--budget", given)
        assert code == 2
        assert f"{given}: expected tokens that a KV head keeps, such as 1024, not a share or bytes" in err
        assert err.count("\n") == 1


@pytest.fixture
def small(machine, monkeypatch):
    """Three policies, and a few steps of each."""
    three = [[{"name": "dense"}], *(entry for entry in choosing._policies(96) if entry[0]["name"] in ("sink_window", "snapkv"))]
    monkeypatch.setattr(choosing, "_policies", lambda budget: three)
    monkeypatch.setattr(choosing, "_FEWEST", 3)
    monkeypatch.setattr(choosing, "_PLENTY", 1)


@pytest.mark.slow("measures suites")
@pytest.mark.filterwarnings("ignore")  # lm-eval and its packages have opinions of their own
def test_it_ends_in_a_sentence_a_table_and_a_page_and_resumes(small, tmp_path, capsys):
    command = ["which", "builtin:recall", "--budget", 96, "--minutes", 1, "--results", tmp_path, "--device", "cpu"]
    code, out, err = bench(capsys, *command, "--dry-run")
    assert code == 0
    assert "3 policies; 20 streams of 352 tokens of built-in prose; 20 questions of kvbench_once and kvbench_needle" in out
    assert not list(tmp_path.iterdir())
    code, out, err = bench(capsys, *command)
    assert code == 0, err
    head, *rows = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert head[:2] == ["policy", "text"]
    assert {"once, seen", "once, unseen", "needle, seen", "needle, unseen", "ms/token"} <= set(head)
    assert {row[0] for row in rows} == {"dense", "sink_window", "snapkv"}
    assert "builtin:recall, 96 tokens: snapkv" in " ".join(out.split())
    assert (tmp_path / "index.html").exists()
    measured_at = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json") if file.name != "feed.json"}
    (suite,) = tmp_path.rglob("*.yaml")
    kept = suite.read_text()
    code, out, err = bench(capsys, *command, "--json")
    assert code == 0
    assert json.loads(out)["sentence"].startswith("builtin:recall, 96 tokens: snapkv")
    assert "trying policies" not in err
    assert {file: file.stat().st_mtime_ns for file in measured_at} == measured_at
    assert suite.read_text() == kept


@pytest.mark.slow("measures suites")
@pytest.mark.filterwarnings("ignore")
def test_what_dense_can_not_answer_is_left_out(small, tmp_path, capsys, monkeypatch):
    """Then no policy is measured with it, and a sentence says so."""
    monkeypatch.setattr(choosing, "FLOOR", 1.1)
    command = ["which", "builtin:recall", "--budget", 96, "--minutes", 1, "--results", tmp_path, "--device", "cpu"]
    code, out, err = bench(capsys, *command)
    assert code == 0
    for kind in ("once", "needle"):
        assert f"Dense answers 100 % of kvbench_{kind} right, so its answers say little about policies: left out." in err
    asked = {file.name.partition("-")[0] for file in tmp_path.rglob("*.samples.jsonl*")}
    assert asked == {"dense"}
    assert "once" not in out.splitlines()[0]


def test_a_policy_that_leads_everywhere_is_the_answer():
    text = [measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 3.0)]
    found = which(text, 8)
    assert found.sentence == "m, 8 tokens: h2o: no other is better, at 95 % confidence, at anything that was measured."
    assert [row["policy"] for row in found.rows] == ["dense", "h2o", "window"]
    assert [row["text"].endswith(" *") for row in found.rows] == [False, True, False]


def test_where_none_leads_everywhere_each_has_its_own():
    half = "10" * 100
    text = [measured("dense", 1.9, None), measured("h2o", 2.0), measured("window", 3.0)]
    asked = [answered("dense", "1" * 200, None), answered("h2o", "0" * 200), answered("window", half)]
    questions = [edit(r, cell={"evict": "prompt"}) if r.cell.capacity else r for r in asked]
    assert which([*text, *questions], 8).sentence == (
        "m, 8 tokens: no policy leads in everything. At 95 % confidence no other is better than these. "
        "text: h2o; StreamEval, seen: window."
    )


def test_without_intervals_nothing_is_claimed():
    short = [measured(p, n, tokens=1024) for p, n in (("h2o", 2.0), ("window", 3.0))]
    assert which(short, 8).sentence == "m, 8 tokens: nothing tells the policies apart."
