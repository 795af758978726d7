"""What a run tells whoever watches it."""

from __future__ import annotations

from typing import Protocol

from kvbench.harness.records import Record


class Watcher(Protocol):
    """Receives the progress of a run."""

    def begin(self, label: str, number: int, cells: int, total: int) -> None:
        """A cell, or a group of cells side by side, starts. It has `total` tokens; 0 if tokens don't measure its progress."""

    def advance(self, tokens: int, text: str) -> None:
        """`tokens` of it are done; `text` is the figure so far."""

    def note(self, label: str, text: str) -> None:
        """Something worth knowing about a policy; nothing if empty."""

    def end(self, label: str, record: Record, skipped: bool) -> None:
        """A cell has its record; `skipped` if an earlier run wrote it."""
