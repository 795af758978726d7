"""Errors: which line of the user's code they come from, the exit codes of `bench`, and what `bench doctor` reports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import bench

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, location_of


def module_of(folder: Path, text: str) -> ModuleType:
    """Import a user's file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "mine.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("mine", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("def go(x):\n    return 1 / 0\n", "mine.py:2, in go"),
        ("def go(x):\n    y = x + 1\n    return y.view(7)\n", "mine.py:3, in go"),
        ("import torch\n\ndef go(x):\n    return torch.nn.functional.softmax(x, 9)\n", "mine.py:4, in go"),
        ("import statistics\n\ndef go(x):\n    return statistics.mean([])\n", "mine.py:4, in go"),
        ("def inner():\n    return {}['a']\n\ndef go(x):\n    return inner()\n", "mine.py:2, in inner"),
    ],
)
@pytest.mark.parametrize("folder", ["home", "site-packages"])
def test_it_is_the_innermost_line_of_the_users_own_code(tmp_path, text, place, folder):
    """This holds for errors that a library raises, and for installed plug-ins, too."""
    module = module_of(tmp_path / folder, text)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        torch.vmap(module.go)(torch.ones(2, 3))  # torch calls the user's function
    with pytest.raises(Exception) as direct:  # noqa: PT011 - likewise
        module.go(torch.ones(2, 3))
    if folder == "site-packages":  # the test itself is not a library, either
        caught.value.__traceback__ = caught.tb.tb_next
        direct.value.__traceback__ = direct.tb.tb_next
    assert location_of(caught.value) == place
    assert location_of(direct.value) == place


def test_what_our_code_raises_on_its_own_is_told_by_its_innermost_line():
    with pytest.raises(UserError) as caught:
        plugins.task_class("no such task")
    caught.value.__traceback__ = caught.tb.tb_next  # without the test's own frame
    assert location_of(caught.value).startswith("plugins.py:")
    assert location_of(caught.value).endswith(", in _find")


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
