"""The gate: nothing changed is green, and each of four injected regressions is red, each for its own reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import injected
import numpy as np
import pytest
from conftest import bench
from test_paper import cell_record
from test_records import record

from harness.cli import judge
from harness.cli.running import Asked
from harness.errors import Exit
from harness.report import baseline, gate

SUITE = """
suite: gate
version: 1
model: {id: "builtin:sink_1"}
task:
  - {name: perplexity, data: prose, tokens: 2048, stride: 32}
  - {name: streameval, lines: 30, query_every: 5, distance: 2}
  - {name: latency, tokens: 128, prompt: 32, rounds: 8, sittings: 2, most_sittings: 2, steps: 8, precision: 0.1}
capacity: 24
policies: [dense, window, h2o]
"""
QUALITY, LATENCY = {"perplexity", "streameval"}, {"latency"}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "gate.yaml"
    path.write_text(SUITE)
    return Asked(str(path), threads=1)


def measured(suite, folder, tasks):
    return suite.measured(folder, [c for c in suite.cells() if c.task.name in tasks], fresh=True, walk=True)


@pytest.fixture(scope="module")
def before(suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    return measured(suite, folder, QUALITY), folder


@pytest.fixture(scope="module")
def latency_before(suite, tmp_path_factory):
    """Three runs of latency between which nothing changed."""
    folder = tmp_path_factory.mktemp("latency")
    return [measured(suite, folder / f"{n}", LATENCY) for n in range(3)]


def states(before, records, folder, check):
    held = [r for r in before[0] if r.cell_id in {x.cell_id for x in records}]
    findings = gate.check((held, before[1]), (records, folder), {})
    return {f.state for f in findings if f.check == check}, gate.exit_code(findings)


def test_nothing_changed_is_green(before, suite, tmp_path):
    records = measured(suite, tmp_path, QUALITY)
    findings = gate.check((before[0], before[1]), (records, tmp_path), {})
    assert {f.state for f in findings} == {"ok"}
    assert {f.check for f in findings} == {"exactness", "quality", "bytes"}
    assert gate.exit_code(findings) == 0


def test_a_wrong_rank_is_red(before, suite, tmp_path):
    with injected.wrong_rank():
        records = measured(suite, tmp_path, {"perplexity"})
    found, code = states(before, records, tmp_path, "exactness")
    assert "regression" in found
    assert code == 1


def test_a_cache_one_slot_too_large_is_red(before, suite, tmp_path):
    with injected.larger_cache():
        records = measured(suite, tmp_path, {"perplexity"})
    found, code = states(before, records, tmp_path, "bytes")
    assert "regression" in found
    assert code == 1


def test_half_a_percent_of_perplexity_is_red_where_tokens_alone_would_not_show_it(before, suite, tmp_path):
    """On another device, where tokens may differ a little: the paired mean shows it."""
    with injected.worse():
        records = measured(suite, tmp_path, {"perplexity"})
    records = [dataclasses.replace(r, facts=r.facts | {"device": "another"}) for r in records]
    found, code = states(before, records, tmp_path, "quality")
    assert found == {"regression"}
    assert code == 1
    assert states(before, records, tmp_path, "exactness")[0] == {"not compared"}


def test_without_an_interval_the_margin_decides_and_rounding_is_no_regression():
    for change, expected in ((1e-7, "ok"), (0.0005, "ok"), (-0.1, "ok"), (0.005, "regression")):
        base, now = record("h2o", 1000, 2.0), record("h2o", 1000, 2.0 + change)  # too large a cache for so short a text
        now.facts = {"device": "another"}
        (found,) = [f for f in gate.check(([base], Path()), ([now], Path()), {}) if f.check == "quality"]
        assert "too short" in found.says
        assert found.state == expected, change


@pytest.mark.parametrize(
    ("higher", "change", "expected"),
    [(True, -0.05, "regression"), (True, 0.05, "ok"), (False, 0.05, "regression"), (True, -0.005, "ok")],
)
def test_of_a_score_of_few_questions_the_margin_decides_in_its_own_direction(higher, change, expected):
    def scored(by):
        scores = [0.25 + by, 0.5 + by, 0.75 + by]
        metrics = {"metric": "f1", "higher_is_better": higher, "questions": 3, "score": 0.5 + by, "stderr": 0.1, "scores": scores}
        return cell_record(metrics, task={"name": "lm_eval", "tasks": "x"})

    (found,) = [f for f in gate.check(([scored(0.0)], Path()), ([scored(change)], Path()), {}) if f.check == "quality"]
    assert "too few" in found.says
    assert found.state == expected


def latency_run(ratio):
    """Records of dense and of h2o, whose step takes `ratio` of dense's."""
    rounds = {"dense": 1.0, "h2o": ratio}
    return [cell_record({"step_ms": ms, "rounds_ms": [ms] * 6, "together": "x"}, policy=name, task={"name": "latency"})
            for name, ms in rounds.items()]  # fmt: skip


def test_what_looks_slower_is_measured_again_and_only_what_stays_slower_is_red():
    base, fast, slow = latency_run(1.5), latency_run(1.52), latency_run(2.0)
    bands = baseline.bands([base] * 4)
    first = gate.check((base, Path()), (slow, Path()), bands)
    assert gate.exit_code(first) == 1
    for runs, expected in (([fast], 0), ([slow, fast], 0), ([slow, slow], 1)):
        measured_again = iter(runs)
        found = judge._again(first, lambda n, left=measured_again: next(left), bands, base)
        assert gate.exit_code(found) == expected
        assert len(found) == len(first)
        assert next(measured_again, None) is None, "no more often than needed"


def latency_states(runs, run):
    findings = gate.check((runs[0], Path()), (run, Path()), baseline.bands(runs))
    return {f.cell.split(", ")[2].split()[0]: f.state for f in findings}


@pytest.mark.alone
def test_a_slowdown_of_30_percent_in_one_policy_is_red(latency_before, suite, tmp_path):
    with injected.slowdown():
        run = measured(suite, tmp_path, LATENCY)
    assert latency_states(latency_before, run)["h2o"] == "regression"


@pytest.mark.alone
def test_what_was_measured_three_times_lies_in_its_band(latency_before):
    bands = baseline.bands(latency_before)
    assert len(bands) == 2, "of all but dense, the yardstick"
    assert all(b.low < b.ratio < b.high and b.runs == 3 for b in bands.values())
    for run in latency_before:
        assert set(latency_states(latency_before, run).values()) == {"ok"}


@pytest.mark.parametrize("what", [{"threads": 7}, {"device": "another"}, {"instructions": "AVX2"}])
def test_latency_of_elsewhere_is_not_compared(what):
    base, slow = latency_run(1.5), latency_run(3.0)
    for r in base:
        r.facts |= {"threads": 2, "device": "one", "instructions": "AVX512"}
    for r in slow:
        r.facts |= base[0].facts | what
    (found,) = gate.check((base, Path()), (slow, Path()), baseline.bands([base] * 4))
    assert (found.state, gate.exit_code([found])) == ("not compared", 0)
    assert " -> " in found.says


def test_a_band_is_as_wide_as_what_was_seen_and_never_narrow():
    (narrow,) = baseline.bands([latency_run(1.5)] * 4).values()
    assert narrow.ratio == 1.5
    assert narrow.high / narrow.ratio == pytest.approx(np.exp(0.1), rel=1e-4)
    (wide,) = baseline.bands([latency_run(x) for x in (1.4, 1.5, 1.6, 1.7)]).values()
    assert wide.high / wide.ratio == pytest.approx(np.exp(4 * np.std(np.log([1.4, 1.5, 1.6, 1.7]), ddof=1)), rel=1e-4)
    assert baseline.too_noisy({"narrow": narrow, "wide": wide}) == ["wide"]
    assert baseline.ratio(latency_run(2.0)[0], latency_run(2.0)) is None


def test_what_is_missing_or_of_another_text_can_not_be_compared(before):
    records, folder = before
    assert gate.exit_code(gate.check((records, folder), (records[1:], folder), {})) == Exit.NOT_COMPARABLE
    other = dataclasses.replace(records[0], data=records[0].data | {"ids_sha256": "other"})
    findings = gate.check((records, folder), ([other, *records[1:]], folder), {})
    assert findings[0].check == "data"
    assert gate.exit_code(findings) == Exit.NOT_COMPARABLE
    failed = dataclasses.replace(records[0], status="failed", error={"kind": "NaN", "message": ""}, metrics={})
    findings = gate.check((records, folder), ([failed, *records[1:]], folder), {})
    assert (findings[0].check, findings[0].state, findings[0].says) == ("status", "regression", "ok -> NaN")
    assert gate.exit_code([]) == Exit.NOT_COMPARABLE, "a baseline of nothing holds nobody to anything"


def test_from_the_command_line(suite, tmp_path, capsys):
    small = ["--set", "tokens=512", "--policy", "window", "--policy", "dense", "--threads", 1]
    path = tmp_path / "prose.yaml"
    path.write_text(SUITE.replace("  - {name: streameval", "  # ").replace("  - {name: latency", "  # "))
    folder = tmp_path / "baselines" / "prose"
    code, _, err = bench(capsys, "baseline", "update", folder, "--suite", path, *small, "--why", "a try")
    assert code == 0, err
    about, records = baseline.load(folder)
    assert (about.why, about.options["threads"], len(records)) == ("a try", 1, 2)
    assert about.when.startswith("20")
    assert not list(folder.parent.glob("*.old"))
    keep = tmp_path / "kept"
    code, _, err = bench(capsys, "check", "--baseline", folder, "--keep", keep)
    assert (code, "as good as the baseline" in err) == (0, True)
    code, out, _ = bench(capsys, "check", "--baseline", folder, "--results", keep, "--json")
    assert code == 0
    assert {x["state"] for x in json.loads(out)} == {"ok"}
    file = next(keep.rglob("window*.json"))
    changed = json.loads(file.read_text())
    changed["metrics"]["kv_bytes"] += 1
    file.write_text(json.dumps(changed))
    code, out, err = bench(capsys, "check", "--baseline", folder, "--results", keep)
    assert code == 1
    assert "REGRESSION" in err
    assert "bytes" in out
    code, _, err = bench(capsys, "baseline", "update", folder, "--suite", path, *small, "--why", "again", "--who", "me")
    assert code == 0
    assert baseline.load(folder)[0].who == "me"


@pytest.mark.parametrize("text", [None, "", "[]", "suite: x\n", "suite: [\n", "bands: {a: 3}\n"])
def test_what_is_no_baseline_is_said_in_one_line(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / baseline.FILE).write_text(text)
    code, _, err = bench(capsys, "check", "--baseline", tmp_path)
    assert code == 2
    assert err.count("\n") == 1


def test_the_traces_of_a_baseline_belong_to_it(before, tmp_path):
    """Without them the tokens can't be held to each other: the gate says so, and does not pass."""
    changed = dataclasses.replace(before[0][0], metrics=before[0][0].metrics | {"nll": 1.0})
    findings = gate.check(([before[0][0]], tmp_path), ([changed], tmp_path), {})
    assert {f.check: f.state for f in findings}["exactness"] == "could not compare"
