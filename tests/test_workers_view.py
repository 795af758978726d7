"""How a run of several workers is shown: one line for all, and one for each worker."""

from __future__ import annotations

import io

import pytest
from factories import record
from rich.console import Console

from kvbench.harness.run import progress, workers_view
from kvbench.harness.run.workers_view import WorkersView


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [100.0]
    for module in (progress, workers_view):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None, legacy_windows=False)


def finished(**changes):
    return record(facts={"seconds": 2.0, "tokens_per_second": 6400.0}, **changes)


def test_on_a_terminal_every_worker_has_a_line_and_all_have_one(clock):
    screen = console(terminal=True)
    with WorkersView(screen) as view:
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
    assert "perplexity" not in screen.file.getvalue(), "finished cells leave no line behind"


def test_elsewhere_a_line_is_written_now_and_then_and_one_for_each_result(clock):
    screen = console(terminal=False)
    with WorkersView(screen) as view:
        view.end("dense", finished(), True)
        view.begin("h2o 8", 2, 4, 1000, "worker-1")
        view.begin("latency", 2, 4, 0, "worker-2")
        clock[0] += 15
        view.advance(150, "nll 2.0", "worker-1")
        assert screen.file.getvalue() == ""
        clock[0] += 10
        view.advance(250, "nll 2.0", "worker-1")
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
