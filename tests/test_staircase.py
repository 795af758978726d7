"""The built-in model that looks things up: what its cache still holds it answers, what it has evicted it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import bench_in

from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import AnswerMetrics

RESULTS = Path(__file__).parents[1] / "leaderboard" / "results" / "streameval_cpu"
HELD = {64: 5, 128: 10, 256: 20}  # lines back that sink + window of a capacity still holds whole
MODEL = Path(__file__).parents[1] / "harness" / "models" / "builtin" / "recall"


def test_published_records_are_table_7s_staircase():
    """At least 95 % right for every distance inside the cache, at most 5 % beyond, at three capacities."""
    found = {}
    for record in RecordStore(RESULTS).read_all()[0]:
        if record.cell.policy == "sink_window" and record.cell.model.id == "builtin:recall":
            metrics = record.measured(AnswerMetrics)
            assert metrics is not None
            found[record.cell.capacity, record.cell.options["distance"], record.cell.positions] = metrics
    assert len(found) == 2 * 15
    for (capacity, distance, _), metrics in found.items():
        assert metrics.accuracy >= 0.95 if distance <= HELD[capacity] else metrics.accuracy <= 0.05
        assert set(metrics.in_cache) == {"whole" if distance <= HELD[capacity] else "gone"}


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize(("distance", "least", "most"), [(3, 0.9, 1.0), (12, 0.0, 0.1)])
def test_a_stream_much_longer_than_its_training_length(tmp_path: Path, distance, least, most):
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "suite: s\nversion: 1\ndescription: d\nmodel: {id: 'builtin:recall'}\n"
        f"task: {{name: streameval, distance: {distance}, lines: 200, query_every: 5, streams: 2}}\n"
        "capacity: 64\npolicies: [{name: sink_window, sinks: 4}]\n"
    )
    ran = bench_in("run", suite, "--results", "r", "--threads", 1, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(next((tmp_path / "r").rglob("sink*.json")).read_text())
    assert record["data"]["tokens"] > 3 * 528
    assert record["metrics"]["questions"] > 60
    assert least <= record["metrics"]["accuracy"] <= most


def test_what_the_card_says_is_what_was_asked_for():
    """At least 90 % of registers, keys with several values, chains of two look-ups and needles, under full attention."""
    rows = [line.split("|")[1:4] for line in (MODEL / "README.md").read_text().splitlines() if "[" in line and "%" in line]
    right = {kind.strip(): float(share.split("%")[0]) for kind, share, _ in rows}
    assert all(right[kind] >= 90 for kind in ("registers", "keys", "chains", "needles"))
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 2 * 10**6
