"""Published records are those of the working folder, to the byte; what is damaged is named in one line; and their review."""

import datetime
import importlib.util
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import RECORDS, edit, record, working_copy
from helpers import bench
from test_verify import of_questions, of_tokens

from kvbench.harness.core.errors import Exit, UserError
from kvbench.harness.records import Problem, RecordStore, publish
from kvbench.harness.records.beside import open_trace
from kvbench.harness.report.sources import find_trace, open_records
from kvbench.harness.report.verify import problems
from kvbench.harness.run.request import RunRequest

BYTES = {"kv_bytes": 0, "state_bytes": 0}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def answered(tmp_path):
    """A working folder with a record and its answers, and its published form. -> the record and the two folders."""
    made = edit(of_questions(tmp_path), metrics=BYTES)
    RecordStore(tmp_path / "working").write(made, tmp_path / "x.answers.jsonl", ".answers.jsonl")
    assert publish(tmp_path / "working", tmp_path / "published") == {"s": 1}
    return made, tmp_path / "working", tmp_path / "published"


def test_published_and_written_again_every_file_is_the_same(tmp_path):
    """Records and traces of every task."""
    working = working_copy(RECORDS, tmp_path / "working")
    counts = publish(working, tmp_path / "published", arrays=True)
    assert sum(counts.values()) == len(list(working.rglob("*.json"))) >= 30
    assert sorted(path.name for path in (tmp_path / "published").iterdir()) == sorted(p.name for p in RECORDS.iterdir())
    assert files_of(working_copy(tmp_path / "published", tmp_path / "again")) == files_of(working)
    ordered = [r.as_text() for r in RecordStore(working).read_all()[0]]
    assert [r.as_text() for r in RecordStore(tmp_path / "published").read_all()[0]] == ordered
    before = files_of(tmp_path / "published")
    assert set(publish(working, tmp_path / "published", arrays=True).values()) == {0}
    assert files_of(tmp_path / "published") == before


def test_lines_are_sorted_and_short_and_values_are_found_with_pandas():
    lines = (RECORDS / "budget.jsonl").read_text(encoding="utf-8").splitlines()
    values = [json.loads(line) for line in lines]
    assert values == sorted(values, key=lambda v: (v["cell_id"], v["key"]))
    assert max(map(len, lines)) < 3000
    frame = pd.read_parquet(RECORDS / "budget.parquet")
    for _, made in RecordStore(RECORDS / "budget.jsonl").files():
        row = frame[(frame.cell_id == made.cell_id) & (frame.name == "metrics.blocks.nll_sum")].iloc[0]
        assert (row["values"] / 10**row.decimals).tolist() == made.metrics.blocks.nll_sum


NUMBERS = [*([x] * 16 for x in (1, 0.1, -0.0, 1 / 3, 1e18, 1.0, 1 - 2**63, True)), [1, 1.0] * 8, [0.1] * 15]
OTHERS = ["@", ["@"], {"@": "@"}, {"a": {"b": "@"}}, "x" * 500, "ü\u2028" * 40, {"a": [1.5] * 20, "b": "@"}, None, [], {}]


@pytest.mark.parametrize("value", [*NUMBERS, *OTHERS], ids=lambda v: str(v)[:20])
def test_any_value_is_read_back_as_it_was(tmp_path, value):
    made = record(facts={"new": value, "deep": {"new": value}}, data={"ids_sha256": "x", "tokens": 32768, "new": value})
    RecordStore(tmp_path / "working").write(made)
    publish(tmp_path / "working", tmp_path / "published")
    (again,) = RecordStore(tmp_path / "published").read_all()[0]
    assert again.as_text() == made.as_text()


def test_every_command_reads_both_forms(answered, capsys):
    made, working, published = answered
    for source in (working, published, published / "s.jsonl"):
        (path, found), *_ = RecordStore(source).files()
        assert found == made
        assert problems(found, path.parent) == []
        assert find_trace(found, source).getvalue() == next(working.rglob("*.answers.jsonl")).read_bytes()
        with open_records(str(source)) as (records, _):
            assert records == [made]
        assert bench(capsys, "records", "verify", source)[0] == 0
        assert bench(capsys, "show", "table", made.cell_id[:8], "--results", source)[0] == 0
        assert bench(capsys, "compare", working, source)[0] == 0
    assert path.name == "s.jsonl:1"
    store = RecordStore(published)
    assert store.finished(made) == made
    assert store.finished(edit(record(), cell={"seed": 1})) is None
    finished = datetime.datetime.fromisoformat(made.finished)
    assert datetime.datetime.fromisoformat(store.stamp(made, finished - datetime.timedelta(hours=1))) > finished


def test_a_revision_has_both_files_of_a_suite(answered, tmp_path, monkeypatch):
    made, _, published = answered
    shutil.copytree(published, tmp_path / "repository/leaderboard/records")
    monkeypatch.chdir(tmp_path / "repository")
    author = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "records"]):
        subprocess.run(["git", *command], check=True)
    for source in ("HEAD", "HEAD:leaderboard/records/s.jsonl"):
        with open_records(source) as (records, folder):
            assert records == [made]
            assert find_trace(made, folder) is not None


def test_pages_of_one_suites_file_need_a_place(answered, tmp_path, capsys):
    file = answered[2] / "s.jsonl"
    code, _, said = bench(capsys, "leaderboard", "--results", file)
    assert (code, said) == (Exit.MISTAKE, f"bench: {file}: the records of one suite: say with --out where the pages go\n")
    assert bench(capsys, "leaderboard", "--results", file, "--out", tmp_path / "pages.md")[0] == 0


def test_the_newer_of_two_measurements_stays_and_other_keys_join(tmp_path):
    def published(*made):
        for number, one in enumerate(made):
            RecordStore(tmp_path / f"working{number}").write(one)
            publish(tmp_path / f"working{number}", tmp_path / "published")
        return RecordStore(tmp_path / "published").read_all()[0]

    old, new = record(nll=2.0), record(nll=3.0, finished="2026-02-01T00:00:00+00:00")
    assert published(old, new) == [new]
    assert published(new, old) == [new]
    other = record(key="z" * 64)
    assert published(other) == [new, other]


def test_large_traces_are_left_out_unless_asked_for_and_stay_once_published(tmp_path):
    made = edit(of_tokens(tmp_path), metrics=BYTES)
    RecordStore(tmp_path / "working").write(made, tmp_path / "x.nll.npy")
    publish(tmp_path / "working", tmp_path / "published")
    assert problems(made, tmp_path / "published") is None, "its trace is missing, which is no fault"
    publish(tmp_path / "working", tmp_path / "published", arrays=True)
    publish(tmp_path / "working", tmp_path / "published")
    assert problems(made, tmp_path / "published") == []
    trace = open_trace(made, tmp_path / "published")
    assert np.load(io.BytesIO(trace.getvalue())).dtype == np.float32


def test_a_trace_that_has_changed_is_not_published(answered, capsys):
    _, working, published = answered
    before = files_of(published)
    next(working.rglob("*.answers.jsonl")).write_text("{}\n")
    code, _, err = bench(capsys, "records", "publish", working, published)
    assert (code, err.count("\n"), "its sha256 differs" in err) == (Exit.MISTAKE, 1, True)
    assert files_of(published) == before
    code, _, err = bench(capsys, "records", "publish", working.with_name("nowhere"), published)
    assert (code, err.count("\n")) == (Exit.MISTAKE, 1)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def twice(path: Path) -> None:
    frame = pd.read_parquet(path)
    pd.concat([frame, frame]).to_parquet(path)


def rename(path: Path) -> None:
    for file in (path, path.with_suffix(".parquet")):
        file.rename(file.with_stem("t"))


def text(change):
    """Change a file's text."""
    return lambda path: path.write_text(change(path.read_text()))


DAMAGED = {  # the file that is damaged, how, the path of the problem, and its reason
    "no parquet": ("s.parquet", Path.unlink, "s.jsonl", "s.parquet is missing"),
    "parquet cut": ("s.parquet", cut, "s.parquet", "not readable as the Parquet file of s.jsonl"),
    "rows twice": ("s.parquet", twice, "s.parquet", "two rows of the same record and name"),
    "no line": ("s.jsonl", text(lambda _: ""), "s.jsonl", "holds no records"),
    "a merge": ("s.jsonl", text(lambda lines: lines + "<<<<<<< HEAD\n"), "s.jsonl:2", "not readable as JSON"),
    "a line twice": ("s.jsonl", text(lambda lines: 2 * lines), "s.jsonl:2", "the same cell and key as s.jsonl:1"),
    "renamed": ("s.jsonl", rename, "t.jsonl:1", "belongs into s.jsonl"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_what_is_damaged_is_named_in_one_line(how, answered, capsys):
    _, working, published = answered
    file, damage, name, reason = DAMAGED[how]
    damage(published / file)
    (problem,) = RecordStore(published).read_all()[1]
    assert (problem.path.name, reason in problem.reason) == (name, True), problem
    code, out, _ = bench(capsys, "records", "verify", published)
    assert (code, out.count("\n"), name in out) == (Exit.NO, 1, True)
    with pytest.raises(UserError, match=re.escape(name)):
        publish(published, working.with_name("elsewhere"))
    assert not working.with_name("elsewhere").exists()


def test_a_published_trace_that_was_changed_is_found(answered):
    made, _, published = answered
    frame = pd.read_parquet(published / "s.parquet")
    frame.loc[frame.name == ".answers.jsonl", "text"] += "\n"
    frame.to_parquet(published / "s.parquet")
    (found,) = problems(made, published)
    assert "has changed since it was measured" in found
    assert isinstance(RecordStore(published).read_all()[1], list)
    assert not any(isinstance(x, Problem) for _, x in RecordStore(published).files())


FILE = Path(__file__).parents[1] / "tools" / "review.py"


@pytest.fixture(scope="module")
def review():
    spec = importlib.util.spec_from_file_location("review", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with the record of one cell of quickstart, of a few seconds."""
    request = RunRequest("quickstart", threads=1)
    cell = next(c for c in request.cells() if c.task.name == "streameval" and c.label.startswith("h2o"))
    folder = tmp_path_factory.mktemp("measured")
    request.measure(folder, [cell])
    return folder


@pytest.fixture
def reviewed(review, measured, tmp_path, monkeypatch, capsys):
    """Reviews the record after an edit of its JSON; returns exit code and output."""

    def run(edit=lambda record: None):
        results = tmp_path / "results"
        shutil.copytree(measured, results)
        (file,) = results.rglob("*.json")
        record = json.loads(file.read_text())
        edit(record)
        file.write_text(json.dumps(record))
        (tmp_path / "base").mkdir()
        arguments = ["review", "--base", str(tmp_path / "base"), "--results", str(results), "--sample", "1"]
        monkeypatch.setattr("sys.argv", arguments)
        return review.main(), capsys.readouterr().out

    return run


@pytest.mark.slow("measures a cell twice")
def test_a_right_record_is_measured_again_and_agrees(reviewed):
    code, out = reviewed()
    assert (code, out.splitlines()[-1]) == (0, "1 records are new or changed, 1 measured again, 0 problems")


@pytest.mark.slow("measures a cell twice")
def test_another_answer_is_found_by_measuring_again(review, reviewed, monkeypatch):
    monkeypatch.setattr(review.verify, "problems", lambda record, folder: [])  # forged in every file
    code, out = reviewed(lambda record: record["metrics"].update(accuracy=record["metrics"]["accuracy"] - 0.1))
    assert code == 1
    assert "accuracy is" in out
