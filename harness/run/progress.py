"""Shows the progress of a run on stderr: a live display on a terminal, one line per cell when piped."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from kvbench.harness.core.errors import Exit
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.report.sections import headline

SECONDS_BETWEEN_LINES = 20.0  # about one cell, when piped


class StderrConsole(Console):
    """The console on stderr. If its reader goes away, the run ends as if by SIGPIPE, and no cell counts as failed."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """End the process. Rich would use the exit code of a crash."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        raise SystemExit(Exit.CLOSED_PIPE)


class NoProgress:
    """A `RunWatcher` that shows nothing."""

    def begin(self, label: str, number: int, cells: int, total: int, worker: str = "") -> None:
        """Ignore it."""

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """Ignore it."""

    def idle(self, worker: str) -> None:
        """Ignore it."""

    def note(self, label: str, text: str) -> None:
        """Ignore it."""

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """Ignore it."""


class ProgressView:
    """A `RunWatcher` that shows progress on a console."""

    def __init__(self, console: Console, tracebacks: bool = False) -> None:
        """Watch a run.

        Args:
            console: to show progress on.
            tracebacks: show those of failed cells, too.
        """
        self._console, self._tracebacks = console, tracebacks
        self._live = _LiveDisplay(console) if console.is_terminal else None
        self._head, self._total, self._started, self._last_line = "", 0, 0.0, 0.0
        self._cells = self._done = self._skipped = self._failed = 0
        self._noted = set[str]()  # labels of policies about which something was said

    def __enter__(self) -> Self:
        self.start_display()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop_display()
        if self._skipped:
            cells = f"{self._skipped} cells were" if self._skipped > 1 else "1 cell was"
            again = "them" if self._skipped > 1 else "it"
            self._line(f"{cells} finished before and skipped (--fresh measures {again} again)")
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._cells:
            self._line(f"{self._done} of {self._cells} cells are finished")

    def start_display(self) -> None:
        """Show the live display, if there is one."""
        if self._live is not None:
            self._live.start()

    def stop_display(self) -> None:
        """Remove it."""
        if self._live is not None:
            self._live.stop()

    def begin(self, label: str, number: int, cells: int, total: int, worker: str = "") -> None:
        """Show that a cell, or a group of cells side by side, starts."""
        self._head, self._total = f"[{number}/{cells}] {label}", total
        self._done, self._cells = number - 1, cells
        self._started = self._last_line = time.monotonic()
        if self._live is not None:
            self._live.cell(label, self._done, cells, total)

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """Show how much of it is done, and the figure so far."""
        now = time.monotonic()
        spent = now - self._started
        speed = f"{tokens / max(spent, 1e-9):,.0f} tokens/s, {text}" if self._total else text
        if self._live is not None:
            self._live.advance(tokens if self._total else 0, speed)
        elif now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = f"{tokens:,} of {self._total:,} tokens, {speed}, {spent * (self._total - tokens) / max(tokens, 1):.0f} s left"
            self._line(f"{self._head}: {left if self._total else text}")

    def idle(self, worker: str) -> None:
        """A single worker is never idle."""

    def note(self, label: str, text: str) -> None:
        """Say something about a policy, once a run."""
        if text and label not in self._noted:
            self._noted.add(label)
            self._line(f"{label}: {text}")

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """Show the result of a cell."""
        self._done += 1
        self._skipped += skipped
        self._failed += record.status == "failed"
        if self._live is not None:
            self._live.cells(self._done, self._failed)
        elif not skipped:
            self._line(f"[{self._done}/{self._cells}] {label}: {_outcome(record)}")
        if record.error and self._tracebacks:
            for line in record.error.traceback:
                self._line(line)

    def _line(self, text: str) -> None:
        self._console.print(visible(text), markup=False, highlight=False, soft_wrap=True)


class _LiveDisplay:
    """Two lines of a terminal: the number of finished cells, and the progress of the current cell."""

    def __init__(self, console: Console) -> None:
        # Long text is cut, so that it fits on one line.
        label = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        speed = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}", table_column=label), BarColumn(bar_width=10),
            TextColumn("{task.fields[speed]}", table_column=speed), TimeRemainingColumn(compact=True),
            console=console, transient=True, expand=True,
        )  # fmt: skip
        self._all = self.progress.add_task("cells", total=None, speed="")
        self._one = self.progress.add_task("", total=None, speed="", visible=False)

    def start(self) -> None:
        """Show the display."""
        self.progress.start()

    def stop(self) -> None:
        """Remove the display."""
        self.progress.stop()

    def cell(self, label: str, done: int, cells: int, total: int) -> None:
        """Show a new cell of `total` tokens; 0 if unknown."""
        self.progress.update(self._all, total=cells, completed=done)
        self.progress.remove_task(self._one)
        self._one = self.progress.add_task(escape(visible(label)), total=total or None, speed="")

    def advance(self, tokens: int, speed: str) -> None:
        """Show the progress of the current cell."""
        self.progress.update(self._one, completed=tokens, speed=escape(visible(speed)))

    def cells(self, done: int, failed: int) -> None:
        """Show how many cells are done and how many of them failed."""
        total = self.progress.tasks[0].total
        counted = f"{done} of {total:.0f}" if total else f"{done}"
        self.progress.update(self._all, completed=done, speed=f"{counted}, {failed} failed" if failed else counted)


def _outcome(record: Record) -> str:
    """The result of a cell in one line."""
    if record.status == "failed" and record.error:
        place = f" ({record.error.where})" if record.error.where else ""
        return f"FAILED, {record.error.kind}: {record.error.message}{place}"
    speed = "" if record.facts.tokens_per_second is None else f", {record.facts.tokens_per_second:,.0f} tokens/s"
    return f"{headline(record)}{speed}, {record.facts.seconds or 0.0:.1f} s"
