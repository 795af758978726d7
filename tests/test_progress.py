"""How a run is shown: live on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from factories import record
from rich.console import Console

from kvbench.harness.run import progress
from kvbench.harness.run.progress import ProgressView


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


def test_the_best_so_far_at_each_capacity_is_told_once_a_minute(clock):
    """Of cells of one question; a reference leads at none."""
    screen = console(terminal=False)
    cells = [("recompute_window 8", 8, 1.0), ("h2o 8", 8, 2.0), ("window 8", 8, 2.1), ("window 16", 16, 1.5), ("h2o 16", 16, 1.4)]
    cells += [("dense", None, 1.0)]
    with ProgressView(screen) as view:
        for place, (label, capacity, nll) in enumerate(cells):
            view.begin(label, place + 1, 7, 1000)
            clock[0] += 25
            view.end(label, finished(policy=label.split()[0], capacity=capacity, nll=nll), False)
    told = [line for line in screen.file.getvalue().splitlines() if "best" in line]
    assert told == [
        "3 of 7 cells, about 2 min left; best so far: h2o 8 (perplexity 7.389)",
        "6 of 7 cells, about 25 s left; best so far: h2o 8 (perplexity 7.389), h2o 16 (perplexity 4.055)",
    ]
    live = console(terminal=True)
    with ProgressView(live) as view:
        view.end("h2o 8", finished(), False)
        view._rows.refresh()
        assert "best so far: h2o 8 (perplexity 7.389)" in live.file.getvalue()


def test_the_live_display_is_two_lines_of_any_terminal(clock):
    """A label or a figure that is too long would wrap, and the display would fill the screen with its remains."""
    for width in (40, 80):
        screen = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)
        with ProgressView(screen) as view:
            view.begin("my_policy.py:MyVeryLongPolicyName 128, sinks 4, window 124, [odd] distance 20", 1, 3, 12800)
            clock[0] += 2
            view.advance(6400, "perplexity 123.45, and much else that a task may have to say about it")
            lines = screen.render_lines(view._rows.get_renderable(), pad=False)
        assert len(lines) == 2
        assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


def test_skipped_cells_and_an_interruption_are_told_in_a_line_each(clock):
    screen = console(terminal=False)
    view = ProgressView(screen)
    view.end("window 8", finished(), True)
    view.end("dense", finished(), True)
    view.begin("h2o 8", 3, 5, 1000)
    with pytest.raises(KeyboardInterrupt), view:
        raise KeyboardInterrupt
    assert screen.file.getvalue().splitlines() == [
        "2 cells were finished before and skipped (--fresh measures them again)",
        "2 of 5 cells are finished",
    ]


def test_each_result_says_how_long_the_others_will_take(clock):
    """Skipped cells took no time, and say nothing about the others."""
    screen = console(terminal=False)
    with ProgressView(screen) as view:
        view.end("dense", finished(), True)
        for place, name in enumerate(("h2o 8", "window 8", "random 8")):
            view.begin(name, 2 + place, 4, 1000)
            clock[0] += (40, 160, 10)[place]
            view.end(name, finished(), False)
    assert [line.rpartition(", ")[2] for line in screen.file.getvalue().splitlines() if line.startswith("[")] == [
        "about 80 s left", "about 2 min left", "2.0 s",
    ]  # fmt: skip


def test_a_task_of_unknown_length_has_no_share(clock):
    with ProgressView(console(terminal=True)) as view:
        view.begin("h2o 8", 1, 1, 0)
        view.advance(6400, "2 sittings")
        _, task = view._rows.tasks
        assert (task.total, task.completed, task.fields["text"]) == (None, 0, "2 sittings")


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


def test_on_a_terminal_every_worker_has_a_line_and_all_have_one(clock):
    screen = console(terminal=True)
    with ProgressView(screen) as view:
        view.begin("h2o 8", 1, 4, 1000, "worker-1 on a")
        view.begin("window 8", 1, 4, 1000, "worker-2 on b")
        clock[0] += 10
        view.advance(500, "nll 2.0", "worker-1 on a")
        view.advance(250, "nll 3.0", "worker-2 on b")
        view.advance(250, "nll 3.0", "a worker that has died")
        everything, first, second = view._rows.tasks
        assert everything.fields["text"] == "0 of 4 cells, 75 tokens/s"
        assert (first.description, first.completed, first.total) == ("worker-1 on a: h2o 8", 500, 1000)
        assert second.fields["text"] == "25 tokens/s, nll 3.0"
        view.idle("worker-2 on b")
        view.end("window 8", finished(), False)
        assert everything.fields["text"] == "1 of 4 cells, 50 tokens/s, about 30 s left"
        assert len(view._rows.tasks) == 2
    assert "[1/4]" not in screen.file.getvalue(), "finished cells leave no line behind"


def test_elsewhere_a_line_is_written_now_and_then_and_one_for_each_result(clock):
    screen = console(terminal=False)
    with ProgressView(screen) as view:
        view.end("dense", finished(), True)
        view.begin("h2o 8", 2, 4, 1000, "worker-1")
        view.begin("latency", 2, 4, 0, "worker-2")
        clock[0] += 15
        view.advance(150, "nll 2.0", "worker-1")
        assert screen.file.getvalue() == ""
        clock[0] += 47
        view.advance(620, "nll 2.0", "worker-1")
        view.note("worker-2", "died; what it measured is measured again")
        view.idle("worker-1")
        view.end("h2o 8", finished(status="failed", error={"kind": "MemoryError", "message": "no room"}), False)
    lines = screen.file.getvalue().splitlines()
    assert lines == [
        "[1/4] 1 of 4 cells, 10 tokens/s (worker-1: h2o 8, worker-2: latency)",
        "worker-2: died; what it measured is measured again",
        "[2/4] h2o 8: FAILED, MemoryError: no room",
        "1 cell was finished before and skipped (--fresh measures it again)",
    ]
