"""The user's cache folder, a check whether other users could change its files, and digests of large files. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

from kvbench.harness.core.files import atomic_write

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger("kv-bench")


def cache_folder() -> Path | None:
    """Return the folder `kv-bench` in the user's cache folder; None for a user without a home.

    An empty or relative XDG_CACHE_HOME is ignored, as the XDG base directory specification demands.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path("~/.cache").expanduser()
        except RuntimeError:  # HOME is not set, and the user has no entry in the password database
            return None
    return root / "kv-bench" if root.is_absolute() else None


def make_private(folder: Path) -> None:
    """Create a folder, and missing parents, that only this user can access.

    Raises:
        OSError: the folder can't be created.
    """
    if not folder.parent.exists():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def why_unsafe(path: Path) -> str:
    """Return the reason that other users could change a file or folder; empty if only this user and root can change it.

    Raises:
        OSError: the path doesn't exist.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and path.is_dir():  # a cache folder may be a link
        status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user"
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return f"{path} is neither a file nor a folder"
    return f"others may write to {path}; 'chmod go-w {path}' fixes that" if status.st_mode & _WRITABLE_BY_OTHERS else ""


def private_folder(name: str) -> Path:
    """Return a folder for code or models: in the user's cache or, if the cache is not private, a temporary folder.

    Raises:
        OSError: no folder is writable, not even a temporary one.
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
    """Return a folder that is removed when this process ends, and log the reason for using it once."""
    _log.warning("bench: kernels are built for this process only, and GGUF files converted: %s", reason)
    return Path(_temporary_directory().name)


@lru_cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kv-bench-")


def file_digest(file: Path) -> str:
    """Return the sha256 of a file. Digests are cached by path, size and times, because weights are large.

    Copying and unpacking programs can set a file's modification time, but no program can set the change time of its inode.
    """
    folder = cache_folder()
    try:
        cache = {} if folder is None else json.loads((folder / "digests.json").read_text())
    except (OSError, ValueError):
        cache = {}
    cache = cache if isinstance(cache, dict) else {}  # the file is damaged
    stat = file.stat()
    name = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}"
    if name in cache:
        return str(cache[name])
    with file.open("rb") as stream:
        cache[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    if folder is not None:
        try:
            make_private(folder)
            with atomic_write(folder / "digests.json") as out:
                json.dump(cache, out)
        except OSError:  # the digest is correct without the cache
            pass
    return str(cache[name])
