"""The error of a failed cell, as its record keeps it. Imports no torch."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import where

_TRACEBACK_LINES = 30  # the last ones
_MAX_LINE_CHARACTERS = 300


def failure(error: BaseException) -> dict[str, Any]:
    """An error for a record.

    Returns:
        kind; message: its first line; where: the line of the policy's code, or else of ours, that raised it;
        traceback: its last lines. Files are named without folders, which are the user's business.
    """
    kind = "out of memory" if ran_out_of_memory(error) else type(error).__name__
    return {"kind": kind, "message": first_line(error), "where": where(error), "traceback": _traceback(error)}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device ran out of memory."""
    cuda = any(c.__name__ == "OutOfMemoryError" and c.__module__.split(".")[0] == "torch" for c in type(error).__mro__)
    return cuda or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0][:_MAX_LINE_CHARACTERS] if lines else ""


def _traceback(error: BaseException) -> list[str]:
    """The last lines of a traceback, without folders."""
    exception = traceback.TracebackException.from_exception(error)
    _remove_folders(exception)
    lines = [line[:_MAX_LINE_CHARACTERS] for part in exception.format() for line in part.splitlines()]
    return lines[-_TRACEBACK_LINES:]


def _remove_folders(exception: traceback.TracebackException) -> None:
    for frame in exception.stack:
        frame.filename = Path(frame.filename).name
    for cause in (exception.__cause__, exception.__context__):
        if cause is not None:
            _remove_folders(cause)
