"""The one error type that is a user's mistake and not ours; and what of the system's errors is nobody's."""

from __future__ import annotations

import errno

NO_ROOM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
)  # an OSError's, when the disk is full or not to be written


class UserError(ValueError):
    """What came, what was expected, what to do: one line, shown without a traceback, exit code 2."""

    def __init__(self, message: str) -> None:
        """Whatever a user's file put into the message, it stays one line and moves no cursor."""
        super().__init__("".join(c if c.isprintable() else " " for c in message))
