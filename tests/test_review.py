"""Records of a pull request are verified and, in a sample, measured again."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from kvbench.harness.run.request import RunRequest

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
