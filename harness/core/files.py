"""Files that appear whole or not at all, whatever stands at their place and whoever else writes. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"  # ends the name of every file that is not whole yet


def new_partial(path: Path) -> Path:
    """An empty file beside `path`, to be filled and then put in its place by `put_in_place`.

    Its name is one that nobody else has, and no symbolic link is followed to make it.

    Raises:
        OSError: the folder can't be written to.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0), 0o666))
    return partial


def put_in_place(partial: Path, path: Path) -> None:
    """Move a filled file to its place, on disk before its name is.

    A symbolic link at `path` is replaced, never followed.

    Raises:
        OSError: it can't be moved.
    """
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    with contextlib.suppress(OSError):  # some file systems can't sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write to, which takes the place of `path` when all of it is written; if that fails, nothing has changed.

    Args:
        path: of the finished file; its folder must exist.
        mode: "w" for text in UTF-8, "wb" for bytes.

    Raises:
        OSError: the folder can't be written to, or is full.
    """
    partial = new_partial(path)
    try:
        with partial.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        put_in_place(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def remove_partials(folder: Path) -> None:
    """Remove what killed writers left in a folder and below. Nobody may be writing there."""
    for partial in folder.rglob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)
