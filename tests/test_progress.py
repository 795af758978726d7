"""Display of a run, live and in plain lines, and the places of its records and pages."""

from __future__ import annotations

import io
import re

import pytest
from conftest import bench_in as bench
from factories import cell_record, record
from rich.console import Console

from kvbench.harness.cli.terminal import link
from kvbench.harness.run import progress
from kvbench.harness.run.progress import ProgressView, steps_view


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None, legacy_windows=False)


def finished(**changes):
    return record(facts={"seconds": 2.0, "tokens_per_second": 6400.0}, **changes)


def test_on_a_terminal_a_live_line_shows_the_cell_and_its_speed(clock):
    screen = console(terminal=True)
    with ProgressView(screen) as view:
        view.begin("h2o 8", 1, 3, 12800)
        cells, task = view._rows.tasks
        assert (cells.total, cells.completed) == (3, 0)
        assert (task.description, task.total, task.fields["text"]) == ("h2o 8", 12800, "")
        clock[0] += 2
        view.advance(6400, "nll 2.0")
        assert (task.completed, task.fields["text"]) == (6400, "3,200 tokens/s, nll 2.0")
        view._rows.refresh()
        live = screen.file.getvalue()
        assert "h2o 8" in live
        assert "3,200 tokens/s, nll 2.0" in live
        clock[0] += 60
        view.advance(12800, "nll 2.0")
        assert "left" not in screen.file.getvalue(), "no plain lines beside the live one"
        view.end("h2o 8", finished(), False)
        view.end("window 8", finished(status="failed", error={"kind": "MemoryError", "message": "no room"}), False)
        assert (cells.completed, cells.fields["text"]) == (2, "2 of 3 cells, 1 failed, about 31 s left")
    left = screen.file.getvalue()
    assert "FAILED, MemoryError: no room" in left, "which is worth a look before the end of a long run"
    assert "[1/3]" not in left, "finished cells leave no line behind"


def test_elsewhere_a_line_is_written_now_and_then(clock):
    screen = console(terminal=False)
    with ProgressView(screen) as view:
        view.begin("h2o 8", 1, 2, 1000)
        clock[0] += 50
        view.advance(100, "nll 2.0")
        assert screen.file.getvalue() == ""
        clock[0] += 50
        view.advance(250, "nll 2.0")
        assert screen.file.getvalue() == "[1/2] h2o 8: 250 of 1,000 tokens, 2 tokens/s, nll 2.0, 300 s left\n"
        view.end("h2o 8", finished(), True)
        view.end("random 8", finished(status="failed", error={"kind": "MemoryError", "message": "no room"}), False)
    lines = screen.file.getvalue().splitlines()
    assert lines[1] == "[2/2] random 8: FAILED, MemoryError: no room"
    assert lines[2] == "1 cell was finished before and skipped (--fresh measures it again)"


@pytest.mark.parametrize(("until", "left"), [(None, "about 2 min left"), (90.0, "about 40 s left"), (10.0, "about 1 s left")])
def test_the_time_left_ends_with_the_runs_time(until, left, clock):
    screen = console(terminal=False)
    clock[0] = 0.0
    with ProgressView(screen, **({} if until is None else {"until": until})) as view:
        view.begin("h2o 8", 1, 3, 1000)
        clock[0] += 50
        view.end("h2o 8", finished(), False)
    assert screen.file.getvalue().splitlines()[0].endswith(left)


@pytest.fixture(scope="module")
def asked(model_dir, text_dir):
    """A run of two cells, and one that fails if a `bad.py` is there."""
    options = ["--model", model_dir, "--data", text_dir, "--threads", 1, "--set", "tokens=100", "--set", "streams=1"]
    return ["run", "smoke", *options, "--policy", "dense", "--policy", "window"]


@pytest.mark.parametrize(
    "command",
    [
        ["run", "smoke", "--model", ""],
        ["run", "smoke", "--data", " "],
        ["leaderboard", "--out", ""],
        ["check", "--baseline", "b", "--results", ""],
        ["compare", "a", ""],
        ["records", "export", ""],
    ],
    ids=" ".join,
)
def test_an_empty_argument_is_a_mistake(command, tmp_path):
    """An unset shell variable, for example, would silently mean the current folder or the default."""
    done = bench(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert "is empty" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow("measures suites")
def test_piped_output_is_a_row_a_cell_and_the_closing_is_on_stderr(tmp_path, asked, monkeypatch):
    first = bench(*asked, cwd=tmp_path)
    head, *rows = (line.split("\t") for line in first.stdout.splitlines())
    assert head == ["policy", "capacity", "figure", "kv_bytes", "tokens/s", "status", "cell"]
    assert len(rows) == 2
    assert re.search(r"^\[1/2\] dense: perplexity", first.stderr, re.M)
    assert re.search(r"^window +\S+ +16.5 KiB  ok$", first.stderr, re.M)
    assert first.stderr.endswith(
        "Records: results\nPages: results/index.html and results/README.md, written by: bench leaderboard\n"
    )
    again = bench(*asked, cwd=tmp_path)
    assert again.stdout == first.stdout
    assert again.stderr.splitlines()[0] == "2 cells were finished before and skipped (--fresh measures them again)"
    for folder, code in (("results", 0), ("elsewhere", 2)):
        monkeypatch.setenv("BENCH_RESULTS", folder)
        for verb in (["records", "verify"], ["leaderboard"], ["records", "export", "flat.csv"]):
            assert bench(*verb, cwd=tmp_path).returncode == code
    assert bench("leaderboard", "--results", "results", cwd=tmp_path).returncode == 0, "the option has the last word"
    assert {p.name for p in tmp_path.iterdir()} == {"results", "flat.csv"}


def test_a_dumb_terminal_gets_no_links(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert link(tmp_path, True).startswith("\x1b]8;;file://")
    monkeypatch.setenv("TERM", "dumb")
    assert link(tmp_path, True) == str(tmp_path)


def test_no_policy_leads_without_a_right_answer():
    leaders = progress._Leaders()
    for right, text in ((0, ""), (1, "best so far: h2o")):
        figures = {"questions": 40, "right": right, "accuracy": right / 40}
        leaders.add("h2o", cell_record(figures, task={"name": "streameval", "distance": 5}, capacity=128))
        assert leaders.text().startswith(text)
        assert bool(leaders.text()) == bool(text)


def test_steps_are_shown_on_a_terminal_and_nowhere_else():
    screen, pipe = console(terminal=True), console(terminal=False)
    for made in (screen, pipe):
        with steps_view(made) as begin:
            begin("rules", 1, 2)
            begin("speed", 2, 2)
    assert re.search(r"speed.* 2 of 2", screen.file.getvalue())
    assert pipe.file.getvalue() == ""
