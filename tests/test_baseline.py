"""Baselines: a new one replaces only an old one, and changes to a baseline are noticed when it is read."""

import json
import os
import shutil
from pathlib import Path

import injected
import pytest
import yaml
from factories import record
from helpers import bench
from tampered import TAMPERED, copied

from kvbench.harness.core.errors import Exit, UserError
from kvbench.harness.records import RecordStore
from kvbench.harness.report import baseline
from kvbench.harness.report.baseline import FILE, Baseline, MeasuredWith
from kvbench.harness.report.gate_times import Band

SUITE = """
suite: prose
version: 1
model: {id: "builtin:sink_1"}
task: {name: perplexity, data: prose, tokens: 256}
capacity: 24
policies: [dense, window]
"""
ABOUT = Baseline(suite="quickstart", options=MeasuredWith(threads=1), who="me", when="2026-01-01", why="a try")


def made(folder: Path, scratch: Path, nll: float = 2.0, why: str = "a try") -> Path:
    """A baseline of one record with a trace."""
    store, trace = RecordStore(scratch), scratch / "x"
    scratch.mkdir(parents=True)
    trace.write_bytes(b"nats")
    store.write(record("h2o", 64, nll), trace)
    baseline.store(folder, ABOUT.model_copy(update={"why": why}), scratch)
    return folder


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "baselines" / "mine", tmp_path / "measured")


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "prose.yaml"
    path.write_text(SUITE)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_baseline_is_replaced_whole(folder, tmp_path):
    before = contents(folder)
    assert baseline.load(folder)[0].why == "a try"
    made(folder, tmp_path / "again", 3.0, "another")
    about, (only,) = baseline.load(folder)
    assert (about.why, only.metrics.nll) == ("another", 3.0)
    assert contents(folder) != before
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]


def notes(folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")


def baseline_with(change):
    """A baseline that somebody has changed."""
    return lambda folder: change(made(folder, folder.with_name("measured")))


THERE = {
    "notes": notes,
    "a file": lambda folder: folder.write_text("a README"),
    "a link to notes": lambda folder: (notes(folder.with_name("target")), folder.symlink_to(folder.with_name("target"))),
    "records without a baseline": lambda folder: RecordStore(folder).write(record()),
    "a baseline with a note": baseline_with(lambda folder: (folder / "note.txt").write_text("remember")),
    "a baseline with a record more": baseline_with(lambda folder: RecordStore(folder).write(record("window", 9))),
    "another's YAML": lambda folder: (folder.mkdir(), (folder / FILE).write_text("suite: of clubs\n")),
}


@pytest.mark.parametrize("there", THERE.values(), ids=THERE)
def test_nothing_else_is_replaced_and_nothing_measured_before_that_is_said(there, tmp_path, suite, capsys):
    folder = tmp_path / "mine"
    there(folder)
    before = contents(tmp_path)
    code, _, err = bench(capsys, "baseline", "update", folder, "--suite", suite, "--why", "x")
    assert code == Exit.MISTAKE
    assert err.count("\n") == 1, "and no cell was begun"
    assert contents(tmp_path) == before
    with pytest.raises(UserError):
        made(folder, tmp_path / "at-the-end")


def test_an_error_half_way_leaves_the_old_baseline(folder, tmp_path, monkeypatch):
    before, plain = contents(folder), os.replace

    def dies(source, target):
        if str(source).endswith(".published"):
            raise KeyboardInterrupt
        plain(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "again", 3.0)
    assert contents(folder) == before


@pytest.mark.parametrize("name", [name for name, t in TAMPERED.items() if t.side == "baseline"])
def test_a_baseline_that_was_changed_is_not_read(name, folder, capsys):
    shutil.move(folder, folder.with_name("published"))
    TAMPERED[name].change(copied(folder.with_name("published"), folder))
    code, _, err = bench(capsys, "check", "--baseline", folder, "--results", folder)
    assert (code, err.count("\n")) == (Exit.MISTAKE, 1)
    assert "restore it" in err


def test_a_record_that_is_not_listed_is_refused(folder):
    RecordStore(folder).write(record("window", 9))
    with pytest.raises(UserError, match="is not listed"):
        baseline.load(folder)


def test_bands_come_back_as_they_were(folder, tmp_path):
    band = Band(ratio=1.5, low=1.25, high=1.75, runs=8)
    about = ABOUT.model_copy(update={"bands": {"a" * 64: band}})
    scratch = tmp_path / "again"
    RecordStore(scratch).write(record())
    baseline.store(folder, about, scratch)
    assert baseline.load(folder)[0].bands == {"a" * 64: band}


@pytest.mark.slow("measures suites")
def test_from_the_command_line(suite, tmp_path, capsys):
    small = ["--policy", "window", "--policy", "dense", "--threads", 1]
    folder = tmp_path / "baselines" / "prose"
    code, _, err = bench(capsys, "baseline", "update", folder, "--suite", suite, *small, "--why", "a try")
    assert code == 0, err
    about, records = baseline.load(folder)
    assert (about.why, about.suite, about.options.threads, len(records)) == ("a try", "../../prose.yaml", 1, 2)
    assert about.when.startswith("20")
    assert str(tmp_path) not in (folder / FILE).read_text()
    keep = tmp_path / "kept"
    code, out, err = bench(capsys, "check", "--baseline", folder, "--keep", keep, "--json")
    found = [x for x in json.loads(out) if x["check"] != "speed"]  # other tests run beside this one
    assert {x["state"] for x in found} == {"ok"}
    path = next(keep.rglob("window*.json"))
    changed = json.loads(path.read_text())
    changed["metrics"]["kv_bytes"] += 1
    path.write_text(json.dumps(changed))
    code, out, err = bench(capsys, "check", "--baseline", folder, "--results", keep)
    assert (code, "REGRESSION" in err, "kv_bytes" in out) == (Exit.NO, True, True)
    code, _, err = bench(capsys, "baseline", "update", folder, "--suite", suite, *small, "--why", "again", "--who", "me")
    assert code == 0, err
    assert baseline.load(folder)[0].who == "me"


@pytest.mark.slow("measures suites")
def test_a_model_that_is_refused_now_is_a_regression_and_a_typo_is_not(suite, tmp_path, capsys):
    folder = tmp_path / "mine"
    assert bench(capsys, "baseline", "update", folder, "--suite", suite, "--policy", "window", "--why", "x")[0] == 0
    with injected.refused_model():
        code, out, _ = bench(capsys, "check", "--baseline", folder, "--json")
    (found,) = json.loads(out)
    assert (code, found["check"], found["state"]) == (Exit.NO, "status", "regression")
    assert "the model is refused: sink_1: model family 'llama' can't be driven" in found["says"]
    assert bench(capsys, "check", "--baseline", folder, "--model", "builtin:sonk")[0] == Exit.MISTAKE


BAND = {"ratio": 1.0, "low": 0.9, "high": 1.1, "runs": 8}


@pytest.mark.parametrize(
    "change",
    [
        {"suite": 5},
        {"charm": 1},
        {"options": {"charm": 1}},
        {"options": {"threads": "many"}},
        {"bands": {"a": BAND | {"ratio": float("nan")}}},
        {"bands": {"a": BAND | {"low": 2.0}}},
        {"bands": {"a": BAND | {"high": float("inf")}}},
        {"bands": {"a": 3}},
        {"bands": [1]},
        {"records": {}},
        {"records": {"gone.json": 3}},
        {"records": {"gone.json": "0" * 64}},
        {"records": {"../../x": "0" * 64}},
    ],
    ids=str,
)
def test_a_mistake_in_baseline_yaml_is_one_line_and_no_regression(change, folder, capsys):
    value = yaml.safe_load((folder / FILE).read_text()) | change
    (folder / FILE).write_text(yaml.safe_dump(value))
    code, _, err = bench(capsys, "check", "--baseline", folder)
    assert (code, err.count("\n"), "Traceback" in err) == (Exit.MISTAKE, 1, False), err


def test_an_absolute_path_in_an_option_is_refused_before_anything_is_measured(suite, tmp_path, capsys):
    for option in ("/home/me/mine.py:Mine", "{name: /home/me/mine.py:Mine}", "~/mine.py:Mine"):
        code, _, err = bench(capsys, "baseline", "update", tmp_path / "x", "--suite", suite, "--policy", option, "--why", "x")
        assert (code, "must work on other machines" in err, err.count("\n")) == (Exit.MISTAKE, True, 1)
