"""Compressed records and answers are read as if they were plain."""

from __future__ import annotations

import bz2
import datetime
import os
from pathlib import Path

import pytest
from conftest import bench
from factories import edit
from test_verify import of_questions, of_tokens

from kvbench.harness.core import packed
from kvbench.harness.core.errors import Exit
from kvbench.harness.records import Problem, RecordStore, pack, read
from kvbench.harness.report.sources import find_trace, open_records
from kvbench.harness.report.verify import problems

BYTES = {"kv_bytes": 0, "state_bytes": 0}


@pytest.fixture
def answered(tmp_path):
    """A folder with a record and its answers. -> the store, and the record's file."""
    made = edit(of_questions(tmp_path), metrics=BYTES)
    store = RecordStore(tmp_path / "r")
    return store, store.write(made, tmp_path / "x.answers.jsonl", ".answers.jsonl")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_packed_folder_says_the_same(answered):
    store, path = answered
    before, plain = read(path), files_of(store.folder)
    assert sorted(pack(store.folder)) == sorted(p for p in store.folder.rglob("*") if p.is_file())
    small = files_of(store.folder)
    assert {name.removesuffix(".bz2"): bz2.decompress(data) for name, data in small.items()} == plain
    assert list(store.files()) == [(path, before)]
    assert before == read(path) == read(packed.packed(path)) == store.finished(before)
    assert problems(before, path.parent) == []
    trace = find_trace(before, store.folder)
    assert trace == path.with_suffix(".answers.jsonl")
    assert len(packed.json_lines(trace)) == 30
    for source in (path, packed.packed(path), store.folder):
        with open_records(str(source)) as (records, _):
            assert records == [before]
    assert list(pack(store.folder)) == []
    assert files_of(store.folder) == small


def test_arrays_stay_plain(tmp_path):
    made = edit(of_tokens(tmp_path), metrics=BYTES)
    store = RecordStore(tmp_path / "r")
    path = store.write(made, tmp_path / "x.nll.npy")
    assert list(pack(store.folder)) == [packed.packed(path)]
    assert problems(made, path.parent) == []


def test_what_is_measured_again_replaces_the_packed_record(answered):
    store, path = answered
    made = read(path)
    list(pack(store.folder))
    made.finished = "2031-01-01T00:00:00+00:00"
    store.write(made)
    assert [r.finished for _, r in store.files()] == [made.finished]
    assert not packed.packed(path).exists()


def test_a_time_in_a_packed_record_counts(answered):
    """A record that is written later is stamped later, even if the clock went back."""
    store, path = answered
    made = read(path)
    list(pack(store.folder))
    finished = datetime.datetime.fromisoformat(made.finished)
    assert datetime.datetime.fromisoformat(store.stamp(made, finished - datetime.timedelta(hours=1))) > finished


DAMAGED = {
    "cut off": (lambda path, data: path.write_bytes(data[:-9]), "not readable as JSON"),
    "empty": (lambda path, data: path.write_bytes(b""), "not readable as JSON"),
    "not compressed": (lambda path, data: path.write_bytes(b"{}"), "not readable as JSON"),
    "too large": (lambda path, data: path.write_bytes(bz2.compress(bytes(2**26 + 1))), "not readable as JSON"),
    "a pipe": (lambda path, data: os.mkfifo(path), "not a regular file"),
    "a folder": (lambda path, data: path.mkdir(), "not a regular file"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_one_is_named_and_skipped(answered, kind):
    store, _ = answered
    _, file = pack(store.folder)
    data = file.read_bytes()
    file.unlink()
    damage, reason = DAMAGED[kind]
    damage(file, data)
    (problem,) = store.read_all()[1]
    assert isinstance(problem, Problem)
    assert problem.path == file
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("damage", "says"),
    [(lambda path, data: path.write_bytes(data[:-9]), "can't be read (cut off)"),
     (lambda path, data: path.write_bytes(bz2.compress(b"{}\n")), "its sha256 differs"),
     (lambda path, data: path.write_bytes(bz2.compress(bytes(2**28 + 1))), "larger than 256 MiB unpacked"),
     (lambda path, data: path.symlink_to(os.devnull), "is not a regular file")],
)  # fmt: skip
def test_damaged_answers_are_noticed(answered, damage, says):
    store, path = answered
    file, _ = pack(store.folder)
    data = file.read_bytes()
    file.unlink()
    damage(file, data)
    (problem,) = problems(read(path), path.parent)
    assert says in problem


def test_the_command_packs_what_is_a_record(answered, capsys):
    store, path = answered
    foreign = store.folder / "notes.json"
    foreign.write_text("{}")
    code, out, _ = bench(capsys, "records", "pack", store.folder)
    assert (code, out.split(" compressed")[0]) == (Exit.OK, "2 files")
    assert foreign.read_text() == "{}"
    assert bench(capsys, "records", "verify", path.parent)[2].startswith("1 records are correct, 0 are not")
    code, _, err = bench(capsys, "records", "pack", store.folder / "missing")
    assert (code, "no such folder" in err) == (Exit.MISTAKE, True)
