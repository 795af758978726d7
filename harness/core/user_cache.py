"""The folder of this user's caches, and whether others could change what lies in it. Imports no torch."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger("kv-bench")


def cache_folder() -> Path | None:
    """`kv-bench` in the user's cache folder; None for a user without a home.

    As the XDG base directory specification has it, an XDG_CACHE_HOME that is empty or relative is ignored.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path("~/.cache").expanduser()
        except RuntimeError:  # HOME is not set, and the system doesn't know the user
            return None
    return root / "kv-bench" if root.is_absolute() else None


def make_private(folder: Path) -> None:
    """Make a folder, and the missing ones above it, so that nobody else may write to it.

    Raises:
        OSError: it can't be made.
    """
    if not folder.parent.exists():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def why_unsafe(path: Path) -> str:
    """Why others could change a file or folder of ours, in words; empty if only this user and root can.

    Raises:
        OSError: it is not there.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) and path.is_dir():  # a cache folder may lie elsewhere
        found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user"
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return f"{path} is neither a file nor a folder"
    return f"others may write to {path}; 'chmod go-w {path}' ends that" if found.st_mode & _OTHERS else ""


def private_folder(name: str) -> Path:
    """A folder for files that are run: in the user's cache, or where others could write to that, one of this process alone.

    Raises:
        OSError: no folder can be written to, temporary ones included.
    """
    cache = cache_folder()
    if cache is None:
        return _temporary("there is no home folder")
    folder = cache / name
    try:
        make_private(folder)
        reason = next(filter(None, map(why_unsafe, (folder, cache, cache.parent))), "")
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror}"
    else:
        reason = reason or ("" if os.access(folder, os.W_OK) else f"{folder} can't be written to")
    return _temporary(reason) if reason else folder


@lru_cache
def _temporary(reason: str) -> Path:
    """A folder that goes when this process ends; the reason for it is said once."""
    _log.warning("bench: kernels are built for this process alone: %s", reason)
    return Path(_held().name)


@lru_cache
def _held() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kv-bench-")
