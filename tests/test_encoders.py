"""The script that trains the small encoders of docs/tasks/attention.md: what it makes goes through the two suites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import bench_in

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.slow("trains, if only for a few steps")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("kind", "options", "suite", "data"),
    [
        ("bert", [], "attention-encoder", ["data=prose"]),
        ("vit", ["--registers", "2"], "attention-vision", ["data=shapes", "dataset=null"]),
    ],
)
def test_an_encoder_learns_and_is_looked_at(kind, options, suite, data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import encoders

    for name, value in {"CHARACTERS": 100_000, "IMAGES": 60, "BATCH": 4, "LOG_EVERY": 40}.items():
        monkeypatch.setattr(encoders, name, value)
    encoders.main([kind, str(tmp_path / kind), "--steps", "80", *options])
    first, second = losses(tmp_path / kind)
    assert second < 0.97 * first
    changes = [part for change in ["samples=2", *data] for part in ("--set", change)]
    done = bench_in("run", suite, "--model", tmp_path / kind, *changes, "--threads", 1, "--results", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in (tmp_path / "r").rglob("dense*.json")]
    assert {(record["status"], record["metrics"]["samples"]) for record in records} == {("ok", 2)}
