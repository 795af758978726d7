"""Records are facts: written whole or not at all, never lost, never trusted blindly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.records import RECORD_VERSION, Problem, Record, RecordStore, digest, newest, read
from harness.report.leaderboard import md, render


def record(policy: str = "h2o", capacity: int | None = 8, nll: float = 2.0, **changes) -> Record:
    cell = {
        "suite": "s", "suite_version": 1, "model": {"id": "m", "dtype": "float32"}, "task": {"name": "perplexity", "stride": 1},
        "policy": policy, "parameters": {}, "capacity": capacity, "positions": "cache", "limit": None, "seed": 0,
    }  # fmt: skip
    noise = np.random.default_rng(capacity or 0).normal(size=400)
    blocks = {"nll_sum": [float(32 * (nll + 0.1 * x)) for x in noise], "tokens": [32] * 400, "size": 32}
    metrics = {
        "perplexity": float(np.exp(nll)),
        "nll": nll,
        "bits_per_byte": 1.0,
        "tokens": 12800,
        "blocks": blocks,
        "kv_bytes": 640,
        "texts": {"nll_sum": [sum(blocks["nll_sum"])], "tokens": [12800]},
    }
    made = Record(cell, digest(cell), "k" * 64, "ok", metrics=metrics, data={"ids_sha256": "x", "tokens": 12800})
    made.finished = "2026-01-01T00:00:00+00:00"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


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
    store.trace_path(made).unlink()
    assert store.finished(made) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"version": 1}', '{"version": "x"}', json.dumps({"version": RECORD_VERSION + 1}), '{"hello": 1}'],
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


def test_a_record_whose_cell_was_edited_is_not_trusted(tmp_path: Path):
    path = RecordStore(tmp_path).write(record())
    path.write_text(path.read_text().replace('"capacity": 8', '"capacity": 9'))
    assert isinstance(read(path), Problem)


def test_the_newest_record_of_a_cell_is_shown():
    old, new = record(key="a"), record(key="b", finished="2026-02-01T00:00:00+00:00")
    assert newest([new, old]) == [new]


def test_the_page_is_the_same_for_the_same_records_in_any_order():
    records = [record("dense", None, 1.9), record("recompute_window"), record("h2o", 8, 2.1), record("h2o", 16, 2.05)]
    assert render(records) == render(records[::-1])


def test_differences_are_paired_and_after_the_cache_filled():
    page = render([record("dense", None, 1.9), record("recompute_window", 8, 2.0), record("h2o", 8, 2.1)]).text
    row = next(line for line in page.split("### perplexity")[1].splitlines() if line.startswith("| h2o"))
    assert "+0.1000 [+0.1000, +0.1000]" in row, "the same noise on both sides leaves no width"
    assert "640 B" in row


def test_a_failed_cell_is_shown_as_failed():
    failed = record(status="failed", error={"kind": "out of memory", "message": "x"}, metrics={})
    assert "**failed**: out of memory" in render([failed]).text


def test_nothing_in_a_record_can_be_markup():
    evil = "<script>alert(1)</script> | [x](javascript:y) `z` \n# head"
    page = render([record(policy=evil)]).text
    assert "<script" not in page
    assert "\n# head" not in page
    assert "](javascript" not in page
    assert "|" not in md(evil)


def test_dense_beyond_its_training_length_has_a_trend_and_no_interval():
    facts = {"training_length": 512}
    page = render([record("dense", None, facts=facts), record("h2o", facts=facts)]).text.split("### perplexity")[1]
    assert "(trend)" in next(line for line in page.splitlines() if line.startswith("| dense"))
    assert "| trend |" in next(line for line in page.splitlines() if line.startswith("| h2o"))
