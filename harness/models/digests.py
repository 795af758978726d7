"""Digests of large files, remembered in the user's cache."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.user_cache import cache_folder, make_private


def file_digest(file: Path) -> str:
    """Return the sha256 of a file. Digests are cached by path, size and times, since weights are large.

    Unpackers and copies set the time of modification, but none can set that of the last change of the file's inode.
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
        except OSError:  # it is only a cache
            pass
    return str(cache[name])
