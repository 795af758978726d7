"""What `bench` tells its caller is one table: in the code and in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import bench


@pytest.mark.slow("measures suites")
def test_a_crash_of_ours_has_its_own_code_and_its_traceback(monkeypatch, capsys):
    from kvbench.harness.report import leaderboard

    def broken(*_):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(leaderboard, "render", broken)
    records = Path(__file__).parents[1] / "leaderboard/baselines/quickstart"
    code, _, err = bench(capsys, "leaderboard", "--results", records, "--out", "-")
    assert code == 70
    assert "ZeroDivisionError: division by zero" in err
    assert err.splitlines()[-1].startswith("bench: this is a bug in KV Bench (kv-bench ")


def test_debug_shows_where_a_mistake_was_noticed(capsys):
    plain, debug = bench(capsys, "run", "nowhere.yaml"), bench(capsys, "--debug", "run", "nowhere.yaml")
    assert (plain[0], debug[0]) == (2, 2)
    assert "Traceback" not in plain[2]
    assert "Traceback" in debug[2]
    assert plain[2] == debug[2].splitlines(keepends=True)[-1]


def test_a_folder_that_only_seems_writable_is_a_mistake(tmp_path, capsys):
    """Root may write anywhere, but nobody can make a file in /proc."""
    code, _, err = bench(capsys, "baseline", "update", "/proc/baseline", "--suite", "quickstart", "--why", "x")
    assert code == 2
    assert err.count("\n") == 1


def test_a_capacity_that_would_take_all_memory_is_refused(capsys):
    code, _, err = bench(capsys, "policy", "check", "window", "--capacity", 100_000_000)
    assert (code, "8192" in err) == (2, True)
