"""Reading of users' text files, in UTF-8 only."""

from __future__ import annotations

import codecs
from pathlib import Path

from kvbench.harness.core.errors import UserError

_MARKS = (  # UTF-32 first, because a mark of UTF-32 begins with a mark of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def read_utf8(path: Path) -> str:
    """Return the text of a file, with "\\n" for every line end and without a byte-order mark.

    Raises:
        UserError: the file is not UTF-8; the message has the offset of the first wrong byte, counted from 0.
        OSError: the file can't be read.
    """
    content = path.read_bytes()
    for mark, name in _MARKS:
        if content.startswith(mark):
            raise UserError(f"{path}: begins with the byte-order mark of {name}, expected UTF-8: save it as UTF-8")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, content, error.start) from None
    if "\0" in text:  # UTF-16 without a mark, or a binary file
        raise _not_utf8(path, content, content.index(0))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(path: Path, content: bytes, offset: int) -> UserError:
    return UserError(f"{path}: not text in UTF-8: byte 0x{content[offset]:02x} at offset {offset:,}; save it as UTF-8")
