"""Files that may lie compressed: `x.json` as `x.json.bz2`. Imports no torch.

bzip2 has no header with a time, so that equal contents are equal files, and it packs digits better than gzip.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.harness.core.files import atomic_write

SUFFIX = ".bz2"
_MAX_BYTES = 2**28  # of an unpacked file; a small one can unpack to anything


def packed(path: Path) -> Path:
    """The name of a file's compressed form."""
    return path.with_name(path.name + SUFFIX)


def unpacked(path: Path) -> Path:
    """The name of a file without the suffix of its compressed form."""
    return path.with_suffix("") if path.suffix == SUFFIX else path


def stored(path: Path) -> Path:
    """The file, or its compressed form if there is only that."""
    return packed(path) if not os.path.lexists(path) and os.path.lexists(packed(path)) else path


def content(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """The content of a file, plain or compressed.

    Raises:
        OSError: it can't be read, or is damaged.
        ValueError: its compressed form is damaged, or has more than `limit` bytes unpacked.
    """
    path = stored(path)
    if path.suffix != SUFFIX:
        return path.read_bytes()
    status = path.stat()
    return _unpacked_content(path, limit, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=1)
def _unpacked_content(path: Path, limit: int, _: tuple[int, ...]) -> bytes:
    """Cached, because a trace is read after its hash was checked. `_` changes when the file does."""
    with bz2.open(path) as file:
        try:
            data = file.read(limit + 1)
        except EOFError:
            raise ValueError("cut off") from None
    if len(data) > limit:
        raise ValueError(f"larger than {limit >> 20} MiB unpacked")
    return data


def json_lines(path: Path) -> list[Any]:
    """The values in a file of JSON lines, plain or compressed; raises as `content` does, or a `ValueError`."""
    lines = content(path).splitlines()  # of bytes: text is also split where JSON goes on
    values: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")  # a call a line takes three times as long
    if len(values) != len(lines):
        raise ValueError("a line has several values")
    return values


def digest(path: Path) -> str:
    """sha256 of a file's content, the same for its compressed form; raises as `content` does."""
    path = stored(path)
    if path.suffix == SUFFIX:
        return hashlib.sha256(content(path)).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_packed(path: Path, data: bytes) -> Path:
    """Write the compressed form of a file, which replaces the plain one. Returns its path.

    Raises:
        OSError: it can't be written.
    """
    target = packed(path)
    with atomic_write(target, "wb") as file:
        file.write(bz2.compress(data))
    path.unlink(missing_ok=True)
    return target
