"""`bench doctor` reports what works and what fails, and never fails itself."""

from __future__ import annotations

import torch
from conftest import bench


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
