"""Records hold what their traces say, and go elsewhere whole."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import bench
from test_paper import cell_record
from test_records import record

import harness.records as records_module
from harness.aggregates import of_answers, of_nll, of_steps
from harness.records import Problem, RecordStore, read
from harness.report.export import rows, write
from harness.report.verify import problems

TASK = {"name": "perplexity", "tokens": 5000, "stride": 4}


def with_trace(folder, made, suffix, content):
    path = folder / f"x{suffix}"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    made.trace = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return made


def of_tokens(folder):
    nll = np.random.default_rng(0).gamma(2, 1, 5001).astype(np.float32)
    nll[0] = np.nan
    made = cell_record(of_nll(nll, 1, [1, 2000], 4) | {"bits_per_byte": 1.5}, task=TASK)
    made.data = {"prefix": [0]}
    return with_trace(folder, made, ".nll.npy", nll)


def of_questions(folder):
    answers = [{"right": i % 3 == 0, "held": (1.0, 0.5, 0.0)[i % 3], "reach": 10 + i} for i in range(30)]
    text = "".join(json.dumps(a) + "\n" for a in answers)
    return with_trace(folder, cell_record(of_answers(answers), task={"name": "streameval"}), ".answers.jsonl", text.encode())


def of_times(folder):
    steps = np.random.default_rng(0).gamma(9, 0.2, (12, 8))
    metrics = of_steps(steps, 2) | {"step_ms": float(np.median(np.median(steps, 1)))}
    return with_trace(folder, cell_record(metrics, task={"name": "latency", "batch": 2}), ".steps.npy", steps.astype("<f4"))


MADE = {"tokens": of_tokens, "questions": of_questions, "times": of_times}


@pytest.mark.parametrize("kind", MADE)
def test_what_was_measured_holds(kind, tmp_path):
    assert problems(MADE[kind](tmp_path), tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("tokens", "nll", 1.99), ("tokens", "perplexity", 7.0), ("tokens", "tokens", 4999), ("questions", "accuracy", 0.5),
     ("questions", "outcomes", "1" * 30), ("questions", "right", 11), ("times", "step_ms", 1.0),
     ("times", "rounds_ms", [1.0] * 12)],
)  # fmt: skip
def test_a_figure_that_was_changed_is_found(kind, name, value, tmp_path):
    made = MADE[kind](tmp_path)
    made.metrics[name] = value
    (found,) = problems(made, tmp_path)
    assert found.startswith(f"{name} is ")


@pytest.mark.parametrize("part", ["buckets", "blocks", "on_stride", "texts"])
def test_a_sum_that_was_changed_is_found(part, tmp_path):
    made = of_tokens(tmp_path)
    at = made.metrics[part][1] if part == "buckets" else made.metrics[part]
    if part == "buckets":
        at["nll"] += 0.01
    else:
        at["nll_sum"][1] += 0.01
    assert [p.split()[0] for p in problems(made, tmp_path)] == [part]


def test_another_trace_and_none_are_told_apart(tmp_path):
    made = of_tokens(tmp_path)
    np.save(tmp_path / "x.nll.npy", np.zeros(3))
    assert "sha256" in problems(made, tmp_path)[0]
    (tmp_path / "x.nll.npy").unlink()
    assert problems(made, tmp_path) is None
    assert problems(record(), tmp_path) == []


def test_a_trace_that_fits_nothing_is_a_problem_and_no_crash(tmp_path):
    made = with_trace(tmp_path, of_tokens(tmp_path), ".nll.npy", np.zeros(7, np.float32))
    assert problems(made, tmp_path)
    made = with_trace(tmp_path, of_questions(tmp_path), ".answers.jsonl", b"{}\n")
    assert "can't be computed" in problems(made, tmp_path)[0]


def test_from_the_command_line(tmp_path, capsys):
    store = RecordStore(tmp_path / "results")
    file = store.write(record())
    code, _, err = bench(capsys, "records", "verify", tmp_path / "results")
    assert (code, "1 records hold" in err) == (0, True)
    file.with_name("broken.json").write_text("{")
    code, out, _ = bench(capsys, "records", "verify", tmp_path / "results")
    assert code == 1
    assert "broken.json" in out
    assert bench(capsys, "records", "verify", tmp_path / "nowhere")[0] == 2


@pytest.mark.parametrize("end", ["parquet", "csv"])
def test_an_export_has_every_plain_figure(end, tmp_path, capsys):
    store = RecordStore(tmp_path / "results")
    for made in (record(), cell_record({"x": 1}, task={"name": "unheard_of"}), record("sink_window", 16)):
        store.write(dataclasses.replace(made, trace=None))
    out = tmp_path / f"all.{end}"
    code, said, _ = bench(capsys, "records", "export", out, "--results", tmp_path / "results")
    assert (code, "3 records" in said) == (0, True)
    table = pq.read_table(out).to_pylist() if end == "parquet" else list(csv.DictReader(out.read_text().splitlines()))
    assert len(table) == 3
    h2o = next(row for row in table if row["policy"] == "h2o" and row["task.name"] == "perplexity")
    assert float(h2o["metrics.nll"]) == 2.0
    assert h2o["model.id"] == "m"
    assert not any("blocks.nll_sum" in name for name in h2o)
    assert bench(capsys, "records", "export", tmp_path / "x.xls", "--results", tmp_path / "results")[0] == 2


def test_no_text_in_a_csv_is_a_formula(tmp_path):
    texts = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\tx", "\rx", " =1", "a\u202eb"]
    made = [cell_record({"x": -1.5}, policy=text, parameters={"=k": -3}) for text in texts]
    write(made, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["policy"] for row in table] == ["'=1+1", "'+cmd|' /C calc'!A0", "'-2+3", "'@SUM(A1)", "' x", "' x", "' =1", "ab"]
    assert {(row["metrics.x"], row["parameters.=k"]) for row in table} == {("-1.5", "-3")}
    write(made, tmp_path / "a.parquet")
    assert [row["policy"] for row in pq.read_table(tmp_path / "a.parquet").to_pylist()] == texts, "nothing opens these by itself"


def test_a_cell_can_not_pass_itself_off_as_another_record():
    made = cell_record({"x": 1})
    made.cell |= {"cell_id": "another", "status": "failed"}
    assert [(row["cell_id"], row["status"]) for row in rows([made])] == [(made.cell_id, "ok")]


def test_of_a_cell_measured_twice_the_newest_is_exported_or_all(tmp_path, capsys):
    store = RecordStore(tmp_path / "results")
    for key, day in (("a" * 64, 1), ("b" * 64, 2)):
        store.write(dataclasses.replace(record(), key=key, finished=f"2026-01-0{day}T00:00:00+00:00", trace=None))
    for more, expected in (([], ["b"]), (["--all"], ["a", "b"])):
        out = tmp_path / "some.csv"
        assert bench(capsys, "records", "export", out, "--results", tmp_path / "results", *more)[0] == 0
        table = list(csv.DictReader(out.read_text().splitlines()))
        assert sorted(row["key"][0] for row in table) == expected


def test_a_column_of_mixed_kinds_is_text():
    made = [cell_record({"x": value}) for value in (1, 2.5, "three")]
    assert [row["metrics.x"] for row in rows(made)] == [1, 2.5, "three"]
    from harness.report.export import _column

    assert _column([1, 2.5, None]) == [1.0, 2.5, None]
    assert _column([1, "three", None]) == ["1", "three", None]


def test_an_older_version_is_read_and_a_newer_one_refused(tmp_path, monkeypatch):
    path = RecordStore(tmp_path).write(record())
    monkeypatch.setattr(records_module, "RECORD_VERSION", 2)
    assert isinstance(read(path), Problem), "no way from 1 to 2"
    monkeypatch.setitem(records_module.MIGRATIONS, 1, lambda value: value | {"key": "moved"})
    found = read(path)
    assert (found.version, found.key) == (2, "moved")
    monkeypatch.setitem(records_module.MIGRATIONS, 1, lambda value: value["nothing"])
    assert "which nothing reads" in read(path).reason, "a migration that fails is a problem of the file"
    monkeypatch.setattr(records_module, "RECORD_VERSION", 0)
    assert "newer kv-bench" in read(path).reason
