"""Selection of the files of a user's directory that are read, by suffix and by split."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.shown import visible

SPLITS = ("train", "validation", "test")
_ALSO_NAMED = {"validation": "valid"}  # other names of splits in file names
_NAMED = 3  # number of files that a message names


def files_below(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files with one of these suffixes in a directory and below, sorted by name. `directory` may be a file, too.

    Raises:
        UserError: the directory does not exist.
    """
    if not directory.exists():
        raise UserError(f"{directory}: no such directory (--data or BENCH_DATA)")
    paths = [directory] if directory.is_file() else sorted(directory.rglob("*"))
    return [path for path in paths if path.suffix.lower() in suffixes and path.is_file()]


def bears(file: Path, name: str) -> bool:
    """Whether a file's stem contains a name, such as a split's, as a whole word. "greatest" does not contain "test"."""
    letter = r"[^\W\d_]"
    return re.search(f"(?<!{letter}){re.escape(name)}(?!{letter})", file.stem, re.IGNORECASE) is not None


def of_split(directory: Path, files: Sequence[Path], split: str) -> list[Path]:
    """Return the files whose names contain the name of a split as a whole word; all files if none is named after a split.

    If some files are named after a split, files that are named after no split are left out and named on stderr.

    Raises:
        UserError: the directory has only files of other splits.
    """
    named = [f for f in files if any(_is_of(f, name) for name in SPLITS)]
    chosen = [f for f in named if _is_of(f, split)] if named else list(files)
    if not chosen:
        raise UserError(f"{directory}: no {files[0].suffix} file of the split '{split}', only {', '.join(f.name for f in named)}")
    if unnamed := tuple(f for f in files if f not in {*chosen, *named}):
        say_left_out(directory, unnamed, f"only {listed(named)} {'is' if len(named) == 1 else 'are'} named after a split")
    return chosen


def _is_of(file: Path, split: str) -> bool:
    return bears(file, split) or bears(file, _ALSO_NAMED.get(split, split))


def listed(files: Sequence[Path]) -> str:
    """Return the names of the first files as text."""
    return f"{', '.join(f.name for f in files[:_NAMED])}{', ...' if len(files) > _NAMED else ''}"


@cache
def say_left_out(directory: Path, files: tuple[Path, ...], why: str) -> None:
    """Name on stderr, once, the files that look like data and are not read."""
    print(visible(f"bench: {directory}: not read: {listed(files)}, because {why}"), file=sys.stderr)
