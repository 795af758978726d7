"""Show the progress of a run on stderr: a live display on a terminal, or occasional lines when piped."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from kvbench.harness.core.checks import StepProgress
from kvbench.harness.core.errors import Exit
from kvbench.harness.core.shown import duration, visible
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, QuestionMetrics
from kvbench.harness.report.feed.question import is_reference
from kvbench.harness.report.pairing import question
from kvbench.harness.report.sections import headline
from kvbench.harness.run.ledger import RunWatcher

_SECONDS_BETWEEN_LINES = 60.0  # about work in progress, and about all cells, when piped


class StderrConsole(Console):
    """Console on stderr. If the reader of stderr ends, the run ends as by SIGPIPE, and no cell counts as failed."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """End the process. Rich would use the exit code of a crash."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        raise SystemExit(Exit.CLOSED_PIPE)


@dataclass
class _InFlight:
    """Cell that a worker, or this process, is measuring."""

    label: str
    number: int  # of the cell
    total: int  # tokens; 0 if they don't measure its progress
    started: float
    row: TaskID  # of the live display
    tokens: int = 0  # done

    def speed(self, now: float) -> float:
        """Return the tokens per second."""
        return self.tokens / max(now - self.started, 1e-9) if self.total else 0.0


_MOST_LEADERS = 4


class _Rows(Progress):
    """Live display with a line for all cells, a line for each cell in progress, and a line for the best cells so far."""

    best = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the lines."""
        yield from super().get_renderables()
        if self.best:
            yield Text(self.best, no_wrap=True, overflow="ellipsis")


class _Leaders:
    """Best cell so far at each capacity, for every question."""

    def __init__(self) -> None:
        self._best: dict[tuple[str, ...], dict[int, tuple[float, str]]] = {}
        self._last: tuple[str, ...] = ()

    def add(self, label: str, record: Record) -> None:
        """Compare a finished cell with earlier cells. Cells without a capacity, and references, are ignored."""
        worth, cell = _worth(record), record.cell
        if worth is None or cell.capacity is None or is_reference(record):
            return
        self._last = (question(record), cell.evicts, cell.positions, cell.stored)
        best = self._best.setdefault(self._last, {})
        if cell.capacity not in best or worth > best[cell.capacity][0]:
            best[cell.capacity] = worth, f"{label} ({headline(record)})"

    def text(self) -> str:
        """Return the leader at each of the largest capacities of the question measured last; empty if there is none."""
        leaders = [text for _, (_, text) in sorted(self._best.get(self._last, {}).items())][-_MOST_LEADERS:]
        return f"best so far: {', '.join(leaders)}" if leaders else ""


def _worth(record: Record) -> float | None:
    """Return the figure that ranks cells of a question, higher is better: negated NLL or accuracy; None without right answers."""
    nll, answers = record.measured(NllMetrics), record.measured(QuestionMetrics)
    return -nll.nll if nll is not None else None if answers is None else answers.accuracy or None


class ProgressView(RunWatcher):
    """Shows on a console the number of finished cells, and the current cell of this process or of each worker."""

    def __init__(self, console: Console, tracebacks: bool = False, until: float = math.inf) -> None:
        """Watch a run.

        Args:
            tracebacks: also show the tracebacks of failed cells.
            until: moment of `time.monotonic` by which the run ends.
        """
        self._console, self._tracebacks, self._until = console, tracebacks, until
        self._rows = _rows(console)  # shows nothing unless the console is a terminal
        self._all = self._rows.add_task("cells", total=None, text="")
        self._in_flight: dict[str, _InFlight] = {}  # by worker; "" is this process
        self._begun = self._last_line = self._last_summary = time.monotonic()
        self._cells = self._done = self._skipped = self._failed = 0
        self._has_workers = False
        self._leaders = _Leaders()
        self._noted = set[str]()  # labels of policies with a note

    def __enter__(self) -> Self:
        self._rows.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._rows.stop()
        if self._skipped:
            cells = f"{self._skipped} cells were" if self._skipped > 1 else "1 cell was"
            again = "them" if self._skipped > 1 else "it"
            self._line(f"{cells} finished before and skipped (--fresh measures {again} again)")
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._cells:
            self._line(f"{self._done} of {self._cells} cells are finished")

    def begin(self, label: str, number: int, cells: int, total: int, worker: str = "") -> None:
        """Show that a cell, or a group of cells side by side, starts."""
        now, self._cells, self._has_workers = time.monotonic(), cells, bool(worker)
        if not (self._in_flight or self._measured):
            self._begun = self._last_line = self._last_summary = now
        if not worker:
            self._last_line = now
        self.idle(worker)
        row = self._rows.add_task(escape(visible(f"{worker}: {label}" if worker else label)), total=total or None, text="")
        self._in_flight[worker] = _InFlight(label, number, total, now, row)
        self._show(now)

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """Show the progress of a cell, and its figure so far."""
        flight, now = self._in_flight.get(worker), time.monotonic()
        if flight is None:
            return
        flight.tokens = tokens if flight.total else 0
        speed = f"{flight.speed(now):,.0f} tokens/s, {text}" if flight.total else text
        self._rows.update(flight.row, completed=flight.tokens, text=escape(visible(speed)))
        self._show(now, speed)

    def idle(self, worker: str) -> None:
        """Remove a worker from the display."""
        flight = self._in_flight.pop(worker, None)
        if flight is not None:
            self._rows.remove_task(flight.row)

    def note(self, label: str, text: str) -> None:
        """Show a note about a policy, once per run."""
        if text and label not in self._noted:
            self._noted.add(label)
            self._line(f"{label}: {text}")

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """Show the result of a cell."""
        self.idle("")
        self._done += 1
        self._skipped += skipped
        self._leaders.add(label, record)
        now, failed = time.monotonic(), record.status == "failed"
        self._failed += failed
        if not skipped and (self._rows.disable or failed):
            left = [] if failed else self._left(now)
            self._line(", ".join([f"[{self._done}/{self._cells}] {label}: {_outcome(record)}", *left]))
        if record.error and self._tracebacks:
            for line in record.error.traceback:
                self._line(line)
        self._show(now)
        if self._rows.disable and not skipped and self._done < self._cells and now - self._last_summary > _SECONDS_BETWEEN_LINES:
            self._last_summary = now
            self._line("; ".join(part for part in (self._summary(now), self._leaders.text()) if part))

    @property
    def _measured(self) -> int:
        """Number of cells that this run has measured."""
        return self._done - self._skipped

    def _show(self, now: float, speed: str = "") -> None:
        """Update the live display, or write an occasional line about this process's cell or about all workers."""
        if not self._rows.disable:
            self._rows.best = visible(self._leaders.text())
            self._rows.update(self._all, total=self._cells or None, completed=self._done, text=self._summary(now))
        elif self._in_flight and now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            here = self._in_flight.get("")
            self._last_summary = now if here is None else self._last_summary
            busy = ", ".join(f"{worker}: {flight.label}" for worker, flight in self._in_flight.items())
            self._line(
                f"[{self._done}/{self._cells}] {self._summary(now)} ({busy})" if here is None else self._of(here, now, speed)
            )

    def _of(self, flight: _InFlight, now: float, speed: str) -> str:
        """Return the line about the cell that this process measures."""
        left = (now - flight.started) * (flight.total - flight.tokens) / max(flight.tokens, 1)
        done = f"{flight.tokens:,} of {flight.total:,} tokens, {speed}, {left:.0f} s left" if flight.total else speed
        return f"[{flight.number}/{self._cells}] {flight.label}: {done}"

    def _summary(self, now: float) -> str:
        """Return the number of finished cells, the total speed of workers, and the time left once a cell was measured."""
        parts = [f"{self._done} of {self._cells} cells", *([f"{self._failed} failed"] if self._failed else [])]
        speed = sum(flight.speed(now) for flight in self._in_flight.values()) if self._has_workers else 0.0
        parts += [f"{speed:,.0f} tokens/s"] if speed else []
        return ", ".join([*parts, *self._left(now)])

    def _left(self, now: float) -> list[str]:
        """Return the time left if the remaining cells take as long as measured cells, at most the time to the run's end."""
        left = self._cells - self._done
        if not self._measured or left <= 0:
            return []
        seconds = min((now - self._begun) / self._measured * left, max(0.0, self._until - now))
        return [f"{duration(seconds)} left"]

    def _line(self, text: str) -> None:
        self._console.print(visible(text), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def steps_view(console: Console) -> Iterator[StepProgress]:
    """Yield a function that shows, on a terminal only, the step that begins: its name, its number and the number of steps."""
    with _rows(console) as rows:
        row = rows.add_task("starting", total=None, text="")
        yield lambda name, number, steps: rows.update(
            row, description=escape(visible(name)), total=steps, completed=number - 1, text=f"{number} of {steps}"
        )


def _rows(console: Console) -> _Rows:
    """Create the live display. Long text is cut to the width of the console."""
    label, text = (Column(ratio=1, no_wrap=True, overflow="ellipsis") for _ in range(2))
    return _Rows(
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=label),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[text]}", table_column=text),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        expand=True,
        disable=not console.is_terminal,
    )


def _outcome(record: Record) -> str:
    """Return the result of a cell in one line."""
    if record.status == "failed" and record.error:
        return f"FAILED, {record.error.reason}"
    speed = "" if record.facts.tokens_per_second is None else f", {record.facts.tokens_per_second:,.0f} tokens/s"
    return f"{headline(record)}{speed}, {record.facts.seconds or 0.0:.1f} s"
