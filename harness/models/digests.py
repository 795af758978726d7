"""Digests of large files, cached in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.user_cache import cache_folder, make_private


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
