"""One file with all that a run has come to, from which a run on another machine goes on."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

LIMIT_BYTES = 16 * 2**20  # of the archive; compressing makes it smaller still
_SKIPPED = (".partial", ".html", ".gz")  # unfinished, or made again from the others
_BLOCK, _HEADERS, _SPARE = 512, 2048, 2**17  # bytes: a tar's unit, what it says of a file, and all else


def choose(folder: Path, first: Sequence[str], limit: int = LIMIT_BYTES) -> tuple[list[Path], list[Path]]:
    """Files to pack, and those for which there is no room: the largest.

    Args:
        folder: of the results.
        first: names of files that are packed whatever their size.
        limit: bytes.
    """
    files = [x for x in folder.rglob("*") if x.is_file() and not x.is_symlink()]
    files = [x for x in files if x.suffix not in _SKIPPED and not x.name.startswith(".")]
    files.sort(key=lambda x: (x.name not in first, x.stat().st_size, x))
    packed, left_out, total = list[Path](), list[Path](), _SPARE
    for file in files:
        total += _HEADERS + -(-file.stat().st_size // _BLOCK) * _BLOCK
        (packed if total <= limit or file.name in first else left_out).append(file)
    return packed, left_out


def pack(folder: Path, files: Sequence[Path], archive: Path) -> None:
    """Write files of a folder into an archive, which is replaced as a whole."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:gz") as tar:
        for file in files:
            tar.add(file, file.relative_to(folder).as_posix())
    os.replace(partial, archive)


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of an archive into a folder. Exits with a message if it is none, or holds anything but files below it."""
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            places = [folder / member.name.lstrip("/") for member in members]
            for member, place in zip(members, places, strict=True):
                if not member.isfile() or ".." in place.relative_to(folder).parts:
                    raise tarfile.TarError(f"{member.name} is no plain file below the folder")
            folder.mkdir(parents=True, exist_ok=True)
            for member, place in zip(members, places, strict=True):  # Python 3.11.2 has no filters for `extractall`
                place.parent.mkdir(parents=True, exist_ok=True)
                with cast(IO[bytes], tar.extractfile(member)) as source:
                    place.write_bytes(source.read())
    except (OSError, EOFError, tarfile.TarError) as error:
        sys.exit(f"--from {archive}: {error}")
