"""`bench doctor` reports what works and what fails, and never fails itself."""

from __future__ import annotations

import pytest
import torch
from conftest import bench

from kvbench.harness.cli import doctor


def told(capsys, *args):
    code, out, _ = bench(capsys, "doctor", "--quick", *args)
    return code, dict(line.split(maxsplit=1) for line in out.splitlines())


def test_one_screen_with_what_a_bug_report_needs(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("Once upon a time. " * 50)
    code, found = told(capsys, "--data", tmp_path, "--model", "builtin:sink_1")
    assert code == 0
    assert f"torch {torch.__version__}" in found["packages"]
    assert "threads" in found["device"]
    assert "'book', 900 characters" in found["data"]
    assert "found in" in found["model"]
    assert len(found) <= 24


def test_what_is_missing_is_said_and_the_rest_goes_on(tmp_path, capsys):
    code, found = told(capsys, "--data", tmp_path, "--model", "nope")
    assert code == 1
    assert found["model"].startswith("FAILED: UserError: nope")
    assert found["data"].startswith("FAILED: UserError")
    assert "cache" in found["hub"]


def test_a_hub_out_of_reach_is_a_finding_and_no_failure(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert doctor._hub().startswith("out of reach")


@pytest.mark.slow("measures suites")
def test_speed_and_families_are_measured(monkeypatch):
    monkeypatch.setattr(
        "kvbench.harness.cli.listing.models", lambda: [{"family": "a", "state": "works"}, {"family": "b", "state": "refused"}]
    )
    assert doctor._families() == "1 of 2 work; not b (refused)"
    assert "GB/s" in doctor._speed()
