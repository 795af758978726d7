"""The one error type that is a user's mistake and not ours; and what of the system's errors is nobody's."""

from __future__ import annotations

import difflib
import errno
import sys
import traceback
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from types import FrameType

_LIBRARIES = frozenset({"kvbench", "torch", "transformers", *sys.stdlib_module_names})  # by name, wherever installed

NO_ROOM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
)  # an OSError's, when the disk is full or not to be written


class Exit(IntEnum):
    """What `bench` tells its caller; the README has the same table."""

    OK = 0
    NO = 1  # the verb's question is answered with no: a regression, a record that does not hold, a policy that breaks a rule
    MISTAKE = 2  # the user's: a typo, a missing file, a refused model, a held lock, a full disk
    NOT_COMPARABLE = 3  # the gate has nothing to compare with: another text, a missing record
    FAILED_CELLS = 4  # the run went on to its end, and some cells have no figures
    CRASH = 70  # of ours (EX_SOFTWARE of sysexits.h): please report it
    STOPPED = 130  # by Ctrl-C: 128 + SIGINT
    CLOSED_PIPE = 141  # whoever read our output has gone: 128 + SIGPIPE


class UserError(ValueError):
    """What came, what was expected, what to do: one line, shown without a traceback, exit code 2."""

    def __init__(self, message: str) -> None:
        """Whatever a user's file put into the message, it stays one line and moves no cursor."""
        super().__init__("".join(c if c.isprintable() else " " for c in message))


class RefusedModelError(UserError):
    """A model whose files are fine, and which can't be driven exactly."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What an error about an unknown name ends with: the likeliest that is known, or all of them."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, 1)
    return f", did you mean '{close[0]}'?" if close else f"; there are {', '.join(options)}"


def where(error: BaseException) -> str:
    """The line of a user's code that an error comes from, as "my_policy.py:17, in importance"; empty if it was never raised.

    It is the innermost frame outside our packages and installed ones; else that of an installed plug-in; else the innermost.
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
    """Kind, first line and place of an error: "ZeroDivisionError: division by zero (my_policy.py:17, in importance)"."""
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip()
    parts = [type(error).__name__, *text.splitlines()[:1]]
    place = where(error)
    return ": ".join(parts)[:300] + (f" ({place})" if place else "")


def _is_installed(frame: FrameType) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(frame.f_code.co_filename).parts)
