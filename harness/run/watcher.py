"""What a run tells whoever watches it."""

from __future__ import annotations

from typing import Protocol

from kvbench.harness.records import Record


class Watcher(Protocol):
    """Receives the progress of a run."""

    def begin(self, label: str, number: int, cells: int, total: int, worker: str = "") -> None:
        """A cell, or a group of cells side by side, starts. It has `total` tokens; 0 if tokens don't measure its progress.

        worker: that measures it; empty if this process does.
        """

    def advance(self, tokens: int, text: str, worker: str = "") -> None:
        """`tokens` of what the worker measures are done; `text` is the figure so far."""

    def idle(self, worker: str) -> None:
        """A worker measures nothing now."""

    def note(self, label: str, text: str) -> None:
        """Something worth knowing about a policy; nothing if empty."""

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """A cell has its record; `skipped` if an earlier run wrote it."""
