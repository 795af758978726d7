"""What a cell died of, as its record keeps it. Imports no torch."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import where

_LINES = 30  # of a traceback, its last: where it happened
_WIDTH = 300  # characters of a line


class ApartError(RuntimeError):
    """What a cell died of in a process of its own."""

    def __init__(self, told: dict[str, Any]) -> None:
        """told: as `failure` gave it there."""
        super().__init__(told["message"])
        self.told = told


def failure(error: BaseException) -> dict[str, Any]:
    """An error for a record.

    Returns:
        kind, message (its first line); where: the line of the policy's code, or else of ours, that raised it;
        traceback: its last lines. Files go by their names alone: where they lie is the user's business.
    """
    if isinstance(error, ApartError):
        return error.told
    kind = "out of memory" if ran_out_of_memory(error) else type(error).__name__
    return {"kind": kind, "message": first_line(error), "where": where(error), "traceback": _traceback(error)}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device had no memory left."""
    cuda = any(c.__name__ == "OutOfMemoryError" and c.__module__.split(".")[0] == "torch" for c in type(error).__mro__)
    return cuda or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """Of its message."""
    lines = str(error).strip().splitlines()
    return lines[0][:_WIDTH] if lines else ""


def _traceback(error: BaseException) -> list[str]:
    """Its last lines, without folders."""
    told = traceback.TracebackException.from_exception(error)
    _without_folders(told)
    lines = [line[:_WIDTH] for part in told.format() for line in part.splitlines()]
    return lines[-_LINES:]


def _without_folders(told: traceback.TracebackException) -> None:
    for frame in told.stack:
        frame.filename = Path(frame.filename).name
    for cause in (told.__cause__, told.__context__):
        if cause is not None:
            _without_folders(cause)
