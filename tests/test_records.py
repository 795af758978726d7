"""Records and files are written completely or not at all, never lost, and never trusted blindly."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from factories import changed, edit, record

from kvbench.harness.core.files import atomic_write, new_partial, put_in_place, remove_partials
from kvbench.harness.records import RECORD_VERSION, Problem, Record, RecordStore, digest, newest, read
from kvbench.harness.report.feed import feed
from kvbench.harness.report.markdown import md
from kvbench.harness.report.pairing import past_training
from kvbench.harness.report.sections import section

pytestmark = pytest.mark.fast


def test_what_is_written_is_read_back(tmp_path: Path):
    store = RecordStore(tmp_path)
    written = record()
    assert read(store.write(written)) == written
    assert not list(tmp_path.rglob("*.partial"))


def test_a_finished_cell_is_found_only_with_its_key_and_its_trace(tmp_path: Path):
    store, made = RecordStore(tmp_path), record()
    trace = tmp_path / "t.npy"
    np.save(trace, np.zeros(3))
    assert store.finished(made) is None
    store.write(made, trace)
    assert store.finished(made) == made
    assert store.finished(record(key="z" * 64)) is None
    same_file = record(key=made.key[:-1] + "z")
    assert store.path(same_file) == store.path(made), "file names have the beginning of a key"
    assert store.finished(same_file) is None
    store.trace_path(made).unlink()
    assert store.finished(made) is None
    failed = record(status="failed", error={"kind": "E", "message": ""}, metrics={})
    store.write(failed)
    assert store.finished(failed) is None


@pytest.mark.parametrize(
    "text", ['{"limit": NaN}', "[]", '{"version": 1}', '{"version": "x"}', json.dumps({"version": RECORD_VERSION + 1})]
)
def test_a_file_that_is_no_record_is_named_and_skipped(tmp_path: Path, text: str):
    store = RecordStore(tmp_path)
    store.write(record())
    foreign = tmp_path / "a" / "foreign.json"
    foreign.parent.mkdir()
    foreign.write_text(text)
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    records, problems = store.read_all()
    assert len(records) == 1
    assert {p.path for p in problems} == {foreign, tmp_path / "binary.json"}
    assert foreign.exists()


def spoiled(folder: Path, change) -> Problem | Record:
    """Change a record's file, recompute its hash, and read it."""
    path = RecordStore(folder).write(record())
    value = json.loads(path.read_text())
    change(value)
    value["cell_id"] = digest(value["cell"])
    path.write_text(json.dumps(value).replace("Infinity", "1e400"))
    return read(path)


@pytest.mark.parametrize(
    ("way", "value", "says"),
    [
        ("cell.capacity", 0, "cell.capacity"),
        ("cell.model.dtype", None, "cell.model.dtype"),
        ("cell.parameters.x", 10**30, "cell.parameters.x"),
        ("cell.task.stride", "1", "cell.task.stride"),
        ("metrics.nll", 1e300, "nll"),
        ("metrics.kv_bytes", -1, "kv_bytes"),
        ("metrics.blocks.tokens", [1], "blocks"),
        ("metrics.unknown", [1e400], "unknown"),
        ("data.prefix", 3, "data.prefix"),
        ("trace", {"file": "../../x.nll.npy", "sha256": "a" * 64}, "trace.file"),
        ("key", "../../x", "key"),
        ("finished", "yesterday", "finished"),
        ("version", True, "not a record"),
        ("status", "fine", "status"),
    ],
)
def test_a_field_that_a_reader_would_stumble_over_is_named(tmp_path: Path, way: str, value, says: str):
    def change(whole):
        *parents, last = way.split(".")
        for name in parents:
            whole = whole[name]
        whole[last] = value

    found = spoiled(tmp_path, change)
    assert isinstance(found, Problem)
    assert says in found.reason
    assert "\n" not in found.reason


def test_keys_that_nobody_knows_are_fine(tmp_path: Path):
    def change(whole):
        for part in ("cell", "metrics", "data", "facts"):
            whole[part]["new"] = {"a": [1, None, "x", 2.5]}

    assert isinstance(spoiled(tmp_path, change), Record)


def test_environments_and_hidden_folders_are_not_read(tmp_path):
    """A folder of results may be a project's: its .venv has thousands of JSON files."""
    path = RecordStore(tmp_path).write(record())
    for folder in (".venv", "env"):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / "a.json").write_text("{")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    assert [p for p, _ in RecordStore(tmp_path).files()] == [path]


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "dangling", "device", "huge", "nested", "latin-1"])
def test_what_can_not_be_read_is_a_problem_and_no_wait(tmp_path: Path, kind: str):
    path = tmp_path / "a.json"
    make = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to("a.json"),
        "dangling": lambda: path.symlink_to("nowhere"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "huge": lambda: (path.touch(), os.truncate(path, 2**33)),
        "nested": lambda: path.write_text('{"version": ' + "[" * 100_000),
        "latin-1": lambda: path.write_bytes('{"version": 1, "x": "é"}'.encode("latin-1")),
    }
    make[kind]()
    found = read(path)
    assert isinstance(found, Problem)
    expected = {"dangling": "does not exist", "huge": "larger than 64 MiB"} | dict.fromkeys(
        ["pipe", "folder", "device"], "not a regular file"
    )
    assert expected.get(kind, "not readable as JSON") in found.reason
    assert [p.path for p in RecordStore(tmp_path).read_all()[1]] == [path]


def test_the_newest_is_told_by_the_clock_and_not_by_the_letters():
    early = record(key="a", finished="2026-01-01T12:00:00+14:00")
    late = record(key="b", finished="2026-01-01T00:00:00+00:00")
    assert newest([late, early]) == [late]


def test_a_record_whose_cell_was_edited_is_not_trusted(tmp_path: Path):
    path = RecordStore(tmp_path).write(record())
    path.write_text(path.read_text().replace('"capacity": 8', '"capacity": 9'))
    assert isinstance(read(path), Problem)


def test_the_newest_record_of_a_cell_is_shown():
    old, new = record(key="a"), record(key="b", finished="2026-02-01T00:00:00+00:00")
    assert newest([new, old]) == [new]


def test_a_failed_cell_is_shown_as_failed():
    failed = record(status="failed", error={"kind": "out of memory", "message": "x"}, metrics={})
    assert "**failed**: out of memory" in section(failed, []).text


def test_the_page_is_the_same_for_the_same_records_in_any_order():
    records = [record("dense", None, 1.9), record("recompute_window"), record("h2o", 8, 2.1), record("h2o", 16, 2.05)]
    assert section(records[0], records) == section(records[0], records[::-1])


def test_differences_are_paired_and_after_the_cache_filled():
    page = section(record("dense", None, 1.9), [record("recompute_window", 8, 2.0), record("h2o", 8, 2.1)]).text
    row = next(line for line in page.splitlines() if line.startswith("| h2o"))
    assert "+0.1000 [+0.1000, +0.1000]" in row, "the same noise on both sides leaves no width"
    assert "640 B" in row


def test_nothing_in_a_record_can_be_markup():
    evil = "<script>alert(1)</script> | [x](javascript:y) `z` \n# head"
    page = section(record(policy=evil), []).text
    assert "<script" not in page
    assert "\n# head" not in page
    assert "](javascript" not in page
    assert "|" not in md(evil)


def test_nothing_in_a_record_is_invisible_on_the_page():
    evil = "a\x00\x1b[2J\x9b1m\u202e\u2066\u200f\u061c\u200b\ufeff\u3164\ufe0fb\tc"
    made = record(evil, data={"source": evil, "texts": [evil]}, facts={"device": evil, "versions": {evil: evil}})
    other = record("window", data=made.data.as_json(), facts={"device": evil})
    made, other = (changed(r, cell={"model": {"id": evil, "dtype": "float32"}}) for r in (made, other))
    page = section(made, [other])
    shown = [page.text, *(json.dumps(c.spec, ensure_ascii=False) for c in page.charts)]
    assert page.charts
    assert all(c.isprintable() or c == "\n" for text in shown for c in text)
    assert "a&#91;2J1mb c" in page.text


def test_dense_beyond_its_training_length_has_a_trend_and_no_interval():
    facts = {"training_length": 512}
    page = section(record("dense", None, facts=facts), [record("h2o", facts=facts)]).text
    assert "(trend)" in next(line for line in page.splitlines() if line.startswith("| dense"))
    assert "| trend |" in next(line for line in page.splitlines() if line.startswith("| h2o"))


@pytest.mark.parametrize(("tokens", "positions", "trend"), [(513, "stream", True), (512, "stream", False), (513, "cache", False)])
def test_a_prompt_that_grows_beyond_the_training_length_has_a_trend_too(tokens, positions, trend):
    """Renumbered, 500 tokens of the prompt of 508 are gone when the rest is read."""
    cut = {"evict": "prompt", "positions": positions, "task": {"name": "perplexity", "stride": 1, "prompt": 508}}
    made = edit(record("h2o", 8, facts={"training_length": 512}), cell=cut, data={"tokens": tokens})
    assert past_training(made) == trend
    (question,) = feed([made, changed(made, cell={"policy": "window"})])["questions"]
    assert ("too long for the model's training" in question["budgets"][0]["finding"]) == trend
    assert not past_training(edit(made, cell={"evict": "step"}))


def test_what_fails_half_way_changes_nothing(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before")

    def write_half():
        with atomic_write(path) as file:
            file.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left on device") as caught, atomic_write(tmp_path / "page.md"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "page.md")


def test_a_symbolic_link_is_replaced_and_its_target_left_alone(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "page.md"
    victim.write_text("mine")
    path.symlink_to(victim)
    with atomic_write(path) as file:
        file.write("page")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("mine", "page", False)


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "page.md"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write("first")
        second.write("second")
    assert path.read_text() == "first", "the outer one is put in place last"
    assert list(tmp_path.iterdir()) == [path]


def test_a_partial_that_exists_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    new_partial(tmp_path / "a")
    with pytest.raises(FileExistsError):
        new_partial(tmp_path / "a")


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "deep").mkdir()
    whole = tmp_path / "deep" / "whole"
    put_in_place(new_partial(whole), whole)
    new_partial(tmp_path / "deep" / "left")
    remove_partials(tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [whole]
