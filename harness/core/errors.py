"""Errors: users' mistakes, exit codes, the line of a user's code that raised an error, and the record of a failed cell."""

from __future__ import annotations

import difflib
import errno
import sys
import traceback
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARIES = frozenset({"kvbench", "torch", "transformers", *sys.stdlib_module_names})

DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})  # the disk is full or read-only
MOST_NAMES = 60  # names listed in a message
LARGEST_INTEGER = 2**63 - 1  # largest integer that records, NumPy and PyTorch hold
_TRACEBACK_LINES = 30  # last lines of a traceback that are kept
_MAX_LINE_CHARACTERS = 300


class Exit(IntEnum):
    """The exit codes of `bench`. The documentation has the same table."""

    OK = 0
    NO = 1  # the command's answer is no: a regression, a record that is not correct
    MISTAKE = 2  # the user's: a typo, a missing file, a refused model, a held lock, a full disk
    NOT_COMPARABLE = 3  # the gate has nothing to compare with: another text, a missing record
    FAILED_CELLS = 4  # the run is complete, but some cells have no figures
    TOO_FEW_COMPARED = 5  # the gate found nothing wrong, but most of its checks do not apply on this machine
    CRASH = 70  # a bug of ours (EX_SOFTWARE in sysexits.h): please report it
    STOPPED = 130  # by Ctrl-C: 128 + SIGINT
    CLOSED_PIPE = 141  # the reader of our output is gone: 128 + SIGPIPE


class UserError(ValueError):
    """A user's mistake. The message is one line with the wrong value, the expected value and a remedy; the exit code is 2."""

    def __init__(self, message: str) -> None:
        """Replace unprintable characters, which may come from a user's file, so that the message stays one line."""
        super().__init__("".join(c if c.isprintable() else " " for c in message))


class RefusedModelError(UserError):
    """A model with intact files that can't be driven exactly."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name or, if none is close, all names if few."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, 1)
    if close:
        return f", did you mean '{close[0]}'?"
    return f"; there are {', '.join(options)}" if len(options) <= MOST_NAMES else f", which is none of {len(options):,} names"


def location_of(error: BaseException) -> str:
    """Return the line of a user's code that raised an error, e.g. "my_policy.py:17, in importance"; empty if never raised.

    The line is in the innermost frame of code that is neither ours nor installed. Without such a frame, it is in the innermost
    frame of an installed plug-in, or else in the innermost frame.
    """
    if isinstance(error, SyntaxError) and error.filename:  # a file that can't be compiled has no frame
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = list(traceback.walk_tb(error.__traceback__))
    plugins = [f for f in frames if f[0].f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES]
    own = [f for f in plugins if not _is_installed(f[0])]
    for frame, line in reversed(own or plugins or frames):
        return f"{Path(frame.f_code.co_filename).name}:{line}, in {frame.f_code.co_name}"
    return ""


def described(error: BaseException) -> str:
    """Return type, first line and place of an error: "ZeroDivisionError: division by zero (my_policy.py:17, in importance)"."""
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip()
    parts = [type(error).__name__, *text.splitlines()[:1]]
    place = location_of(error)
    return ": ".join(parts)[:300] + (f" ({place})" if place else "")


def _is_installed(frame: FrameType) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(frame.f_code.co_filename).parts)


def failure(error: BaseException) -> dict[str, Any]:
    """Return the form of an error that a failed cell's record keeps. Files are named without their folders, which are private."""
    kind = "out of memory" if ran_out_of_memory(error) else type(error).__name__
    return {"kind": kind, "message": first_line(error), "where": location_of(error), "traceback": _traceback(error)}


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device ran out of memory."""
    cuda = any(c.__name__ == "OutOfMemoryError" and c.__module__.split(".")[0] == "torch" for c in type(error).__mro__)
    return cuda or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0][:_MAX_LINE_CHARACTERS] if lines else ""


def _traceback(error: BaseException) -> list[str]:
    """Return the last lines of a traceback, without folders."""
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
