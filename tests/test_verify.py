"""Records agree with their traces, and an export is complete."""

import copy
import csv
import dataclasses
import hashlib
import json
import math
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
from factories import cell_record, changed, edit, record
from helpers import bench

from kvbench.harness.records import Problem, RecordStore, read
from kvbench.harness.records import record as records_module
from kvbench.harness.records.aggregates import answer_figures, nll_figures, step_figures, timing
from kvbench.harness.report.export import rows, write
from kvbench.harness.report.verify import kv_bytes, problems

pytestmark = pytest.mark.fast


TASK = {"name": "perplexity", "tokens": 5000, "stride": 4}


def with_trace(folder, made, suffix, content):
    path = folder / f"x{suffix}"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    return edit(made, trace={"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})


def of_tokens(folder):
    nll = np.random.default_rng(0).gamma(2, 1, 5001).astype(np.float32)
    nll[0] = np.nan
    made = cell_record(nll_figures(nll, 1, [1, 2000], 4) | {"bits_per_byte": 1.5}, task=TASK)
    edit(made, data={"prefix": [0]})
    return with_trace(folder, made, ".nll.npy", nll)


def of_questions(folder):
    answers = [{"right": i % 3 == 0, "held": (1.0, 0.5, 0.0)[i % 3], "reach": 10 + i} for i in range(30)]
    text = "".join(json.dumps(a) + "\n" for a in answers)
    return with_trace(folder, cell_record(answer_figures(answers), task={"name": "streameval"}), ".answers.jsonl", text.encode())


def of_times(folder):
    steps = np.random.default_rng(0).gamma(9, 0.2, (12, 8))
    median, error = timing([list(steps)])
    metrics = step_figures(steps, 2) | {"step_ms": median, "error": error, "settled": error <= 0.02, "sittings": 1}
    return with_trace(folder, cell_record(metrics, task={"name": "latency", "batch": 2}), ".steps.npy", steps.astype("<f4"))


MADE = {"tokens": of_tokens, "questions": of_questions, "times": of_times}


@pytest.mark.parametrize("kind", MADE)
def test_what_was_measured_holds(kind, tmp_path):
    assert problems(MADE[kind](tmp_path), tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("tokens", "nll", 1.99),
        ("tokens", "perplexity", 7.0),
        ("tokens", "tokens", 4999),
        ("questions", "accuracy", 0.5),
        ("questions", "outcomes", "1" * 30),
        ("questions", "right", 11),
        ("times", "step_ms", 1.0),
        ("times", "rounds_ms", [1.0] * 12),
    ],
)
def test_a_figure_that_was_changed_is_found(kind, name, value, tmp_path):
    made = MADE[kind](tmp_path)
    edit(made, metrics={name: value})
    (found,) = problems(made, tmp_path)
    assert found.startswith(f"{name} is ")


@pytest.mark.parametrize("part", ["buckets", "blocks", "on_stride", "texts"])
def test_a_sum_that_was_changed_is_found(part, tmp_path):
    made = of_tokens(tmp_path)
    value = copy.deepcopy(made.metrics.as_json()[part])
    if part == "buckets":
        value[1]["nll"] += 0.01
    else:
        value["nll_sum"][1] += 0.01
    edit(made, metrics={part: value})
    assert [p.split()[0] for p in problems(made, tmp_path)] == [part]


def test_another_trace_and_none_are_told_apart(tmp_path):
    made = of_tokens(tmp_path)
    np.save(tmp_path / "x.nll.npy", np.zeros(3))
    assert "sha256" in problems(made, tmp_path)[0]
    (tmp_path / "x.nll.npy").unlink()
    assert problems(made, tmp_path) is None
    edit(made, metrics={"bits_per_byte": 0.7, "bytes": 9999})
    assert problems(made, tmp_path)[0].startswith("bits_per_byte is 0.7"), "what needs no trace is said all the same"


def test_a_task_that_keeps_a_trace_has_one_of_its_kind(tmp_path):
    """With `trace: null`, or a trace of another name, any perplexity once passed."""
    made = of_tokens(tmp_path)
    edit(made, metrics={"perplexity": 1.01})
    made.trace = None
    assert "has no trace" in problems(made, tmp_path)[0]
    made = of_tokens(tmp_path)
    (tmp_path / "x.nll.npy").rename(tmp_path / "x.foo")
    edit(made, trace={"file": "x.foo"})
    assert "ends in .nll.npy" in problems(made, tmp_path)[0]
    for kind in ("folder", "pipe"):
        made = of_tokens(tmp_path)
        (tmp_path / "x.nll.npy").unlink()
        (tmp_path / "x.nll.npy").mkdir() if kind == "folder" else os.mkfifo(tmp_path / "x.nll.npy")
        assert "is not a regular file" in problems(made, tmp_path)[0]
        (tmp_path / "x.nll.npy").rmdir() if kind == "folder" else (tmp_path / "x.nll.npy").unlink()


@pytest.mark.parametrize("way", ["kv_bytes", "bits_per_byte", "bytes", "facts.tokens_per_second"])
def test_what_follows_from_the_rest_of_the_record_can_not_be_forged_alone(way, tmp_path):
    made = of_tokens(tmp_path)
    nll, tokens = made.metrics.nll, made.metrics.tokens
    figures = {"bytes": 20000, "bits_per_byte": nll * tokens / math.log(2) / 20000, "kv_bytes": 2 * 9 * 3 * (4 + 4) * 4}
    shapes = [{"layers": 2, "heads": 3, "key_dim": 4, "value_dim": 4, "sliding_window": None}]
    facts = {"kv_shapes": shapes, "measured_seconds": 1.234, "tokens_per_second": round(5000 / 1.23449, 1)}
    edit(made, metrics=figures, facts=facts, data={"tokens": 5000})
    assert problems(made, tmp_path) == []
    part, name = ("facts", way.split(".")[1]) if "." in way else ("metrics", way)
    forged = changed(made, **{part: {name: 2 * (facts | figures)[name]}})
    (said,) = problems(forged, tmp_path)
    assert said.startswith(f"{'bits_per_byte' if way == 'bytes' else way} is ")


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({"capacity": 8}, 9),
        ({"capacity": 100}, 65),
        ({"capacity": None}, 64),
        ({"policy": "recompute_window"}, 0),
        ({"capacity": 8, "task": {"name": "latency", "batch": 4}}, 36),
    ],
    ids=str,
)
def test_kv_bytes_are_those_of_the_cache(changes, slots):
    """With a sliding window of 64 in one of two kinds of layers."""
    made = cell_record({}, model="m", data={"prefix": [0], "tokens": 300}, **changes)
    edit(made, facts={"kv_shapes": [{"layers": 1, "heads": 2, "key_dim": 8, "value_dim": 4, "sliding_window": 64}]})
    assert kv_bytes(made) == min(slots, 64 * made.cell.options.get("batch", 1)) * 2 * 12 * 2


@pytest.mark.parametrize("window", [None, 6])
def test_a_models_facts_tell_its_kv_bytes(window):
    from kvbench.harness.engine.model import adopt
    from kvbench.harness.models.families import tiny_model

    model = adopt(tiny_model("mistral", vocab_size=96, sliding_window=window))
    made = cell_record({}, capacity=8, task={"name": "streameval"})
    edit(made, facts=model.facts())
    assert kv_bytes(made) == model.kv_bytes(8) > 0


def test_a_trace_that_fits_nothing_is_a_problem_and_no_crash(tmp_path):
    made = with_trace(tmp_path, of_tokens(tmp_path), ".nll.npy", np.zeros(7, np.float32))
    assert problems(made, tmp_path)
    made = with_trace(tmp_path, of_questions(tmp_path), ".answers.jsonl", b"{}\n")
    assert "can't be recomputed" in problems(made, tmp_path)[0]


def test_from_the_command_line(tmp_path, capsys):
    made, store = of_tokens(tmp_path), RecordStore(tmp_path / "results")
    edit(made, metrics={"kv_bytes": 640})
    file = store.write(made, tmp_path / "x.nll.npy")
    code, _, err = bench(capsys, "records", "verify", tmp_path / "results")
    assert (code, "1 records are correct, 0 are not, 0 can't be verified without their trace" in err) == (0, True)
    moved = tmp_path / "results" / "flat"
    moved.mkdir()
    for part in [file, *file.parent.glob("*.npy")]:
        part.rename(moved / part.name)
    file = moved / file.name
    assert "1 records are correct" in bench(capsys, "records", "verify", tmp_path / "results")[2], (
        "a trace lies beside its record"
    )
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
    edit(made, cell={"cell_id": "another", "status": "failed"})
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


def test_an_older_version_is_read_and_a_newer_one_refused(tmp_path, monkeypatch):
    path = RecordStore(tmp_path).write(record())
    monkeypatch.setattr(records_module, "RECORD_VERSION", 2)
    assert isinstance(read(path), Problem), "no way from 1 to 2"
    monkeypatch.setitem(records_module.MIGRATIONS, 1, lambda value: value | {"key": "moved"})
    found = read(path)
    assert (found.version, found.key) == (2, "moved")
    monkeypatch.setitem(records_module.MIGRATIONS, 1, lambda value: value["nothing"])
    assert "can't be migrated" in read(path).reason, "a migration that fails is a problem of the file"
    monkeypatch.setattr(records_module, "RECORD_VERSION", 0)
    assert "install a newer one" in read(path).reason
