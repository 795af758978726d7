"""Shows the progress of a run that several workers measure: live on a terminal, a line now and then when piped."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.run.progress import SECONDS_BETWEEN_LINES, ProgressView


@dataclass
class _InFlight:
    """What a worker measures now.

    Attributes:
        label: of the cells.
        total: tokens; 0 if they don't measure its progress.
        started: clock when it began.
        tokens: done.
        row: of the live display; None if there is none.
    """

    label: str
    total: int
    started: float
    tokens: int = 0
    row: TaskID | None = None

    def speed(self, now: float) -> float:
        """Tokens per second."""
        return self.tokens / max(now - self.started, 1e-9) if self.total else 0.0


class WorkersView(ProgressView):
    """A `RunWatcher` of several workers: cells done, what each worker measures, tokens per second of all, and the time left."""

    def __init__(self, console: Console, tracebacks: bool = False) -> None:
        """Watch a run.

        Args:
            console: to show progress on.
            tracebacks: show those of failed cells, too.
        """
        super().__init__(console, tracebacks)
        self._rows = _rows(console) if console.is_terminal else None
        self._all = None if self._rows is None else self._rows.add_task("cells", total=None, text="")
        self._in_flight: dict[str, _InFlight] = {}
        self._begun, self._measured = time.monotonic(), 0
        self._cells, self._last_line = 0, 0.0

    def start_display(self) -> None:
        """Show the live display, if there is one."""
        if self._rows is not None:
            self._rows.start()

    def stop_display(self) -> None:
        """Remove it."""
        if self._rows is not None:
            self._rows.stop()

    def begin(self, label: str, number: int, cells: int, total: int, worker: str = "") -> None:
        """Show that a worker starts with a cell, or a group of cells side by side."""
        now, self._cells = time.monotonic(), cells
        if not self._in_flight and not self._measured:
            self._begun = self._last_line = now
        self.idle(worker)
        self._in_flight[worker] = flight = _InFlight(label, total, now)
        if self._rows is not None:
            flight.row = self._rows.add_task(escape(visible(f"{worker}: {label}")), total=total or None, text="")
        self._show_all()

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """Show how much a worker has done, and the figure so far."""
        flight, now = self._in_flight.get(worker), time.monotonic()
        if flight is None:
            return
        flight.tokens = tokens if flight.total else 0
        if self._rows is not None and flight.row is not None:
            speed = f"{flight.speed(now):,.0f} tokens/s, {text}" if flight.total else text
            self._rows.update(flight.row, completed=flight.tokens, text=escape(visible(speed)))
        self._show_all()

    def idle(self, worker: str) -> None:
        """Show a worker no longer."""
        flight = self._in_flight.pop(worker, None)
        if flight is not None and flight.row is not None and self._rows is not None:
            self._rows.remove_task(flight.row)

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """Show the result of a cell."""
        self._measured += not skipped
        super().end(label, record, skipped)
        if not skipped:
            self._show_all()

    def _show_all(self) -> None:
        """The line about all workers: live, or now and then."""
        now = time.monotonic()
        if self._rows is not None and self._all is not None:
            self._rows.update(self._all, total=self._cells or None, completed=self._done, text=self._summary(now))
        elif now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            busy = ", ".join(f"{worker}: {flight.label}" for worker, flight in self._in_flight.items())
            self._line(f"[{self._done}/{self._cells}] {self._summary(now)} ({busy})")

    def _summary(self, now: float) -> str:
        parts = [f"{self._done} of {self._cells} cells", *([f"{self._failed} failed"] if self._failed else [])]
        speed = sum(flight.speed(now) for flight in self._in_flight.values())
        parts += [f"{speed:,.0f} tokens/s"] if speed else []
        if self._measured:
            parts.append(f"about {(now - self._begun) / self._measured * (self._cells - self._done):,.0f} s left")
        return ", ".join(parts)


def _rows(console: Console) -> Progress:
    """A line for all, and one for each worker; long text is cut."""
    label, text = (Column(ratio=1, no_wrap=True, overflow="ellipsis") for _ in range(2))
    return Progress(
        TextColumn("{task.description}", table_column=label), BarColumn(bar_width=10),
        TextColumn("{task.fields[text]}", table_column=text), TimeRemainingColumn(compact=True),
        console=console, transient=True, expand=True,
    )  # fmt: skip
