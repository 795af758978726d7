"""How a run is shown: a live display on a terminal, plain lines when piped. On stderr; results go to stdout."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

from kvbench.harness.core.errors import Exit
from kvbench.harness.records import Record
from kvbench.harness.report.sections import headline

_EVERY = 20.0  # seconds between plain lines of one cell


class StderrConsole(Console):
    """Of stderr. When its reader has gone, the run ends as of SIGPIPE, and no cell is taken for failed by that."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """As rich calls it; its own way out has the exit code of a crash."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        raise SystemExit(Exit.CLOSED_PIPE)


class ProgressView:
    """A `runner.Watcher` that tells a person."""

    def __init__(self, console: Console, tracebacks: bool = False) -> None:
        """Show on this console.

        Args:
            console: to show on.
            tracebacks: of failed cells, too.
        """
        self._console, self._tracebacks = console, tracebacks
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._head, self._total, self._started, self._said = "", 0, 0.0, 0.0
        self._done, self._cells = 0, 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(), console=self._console, transient=True,
            )  # fmt: skip
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, label: str, number: int, cells: int, total: int) -> None:
        """A cell, or several side by side, starts."""
        self._head, self._total = f"[{number}/{cells}] {label}", total
        self._done, self._cells = number, cells
        self._started = self._said = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(self._head, total=total or None, speed="")

    def advance(self, tokens: int, text: str) -> None:
        """Part of it is done."""
        now = time.monotonic()
        spent = now - self._started
        speed = f"{tokens / max(spent, 1e-9):,.0f} tokens/s, {text}" if self._total else text
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=tokens if self._total else 0, speed=speed)
        elif now - self._said > _EVERY:
            self._said = now
            left = f"{tokens:,} of {self._total:,} tokens, {speed}, {spent * (self._total - tokens) / max(tokens, 1):.0f} s left"
            self._line(f"{self._head}: {left if self._total else text}")

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """A cell has its record."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        head = f"[{self._done}/{self._cells}] {label}"
        self._done += 1
        if skipped:
            self._line(f"{label}: finished before, skipped (--fresh measures it again)")
        elif record.status == "failed" and record.error:
            place = f" ({record.error.where})" if record.error.where else ""
            self._line(f"{head}: FAILED, {record.error.kind}: {record.error.message}{place}")
            for line in record.error.traceback if self._tracebacks else []:
                self._line(line)
        else:
            speed = record.facts.tokens_per_second
            told = "" if speed is None else f", {speed:,.0f} tokens/s"
            self._line(f"{head}: {headline(record)}{told}, {record.facts.seconds or 0.0:.1f} s")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
