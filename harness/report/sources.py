"""Sources of records: a file, a folder, or a git revision."""

from __future__ import annotations

import glob
import io
import itertools
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.packed import SUFFIX, stored, unpacked
from kvbench.harness.records import Problem, Record, RecordStore, newest, read

_DEFAULT_FOLDER = "leaderboard/results"  # of a revision


@contextmanager
def open_records(source: str, on_problem: Callable[[Problem], None] = lambda _: None) -> Iterator[tuple[list[Record], Path]]:
    """The newest record of every cell of a source, and the folder that holds them while the context is open.

    Args:
        source: a record's file, a folder, or a git revision with an optional folder: `HEAD~3:leaderboard/results`.
        on_problem: called with every file that can't be read as a record.

    Raises:
        UserError: there are no records.
    """
    path = Path(source).expanduser()
    if stored(path).is_file():
        record = read(path)
        if isinstance(record, Problem):
            raise UserError(f"{source}: {record.reason}")
        yield [record], path.parent
    else:
        with open_folder(source) as folder:
            yield _read_folder(folder, source, on_problem), folder


@contextmanager
def open_folder(source: str) -> Iterator[Path]:
    """A folder of records; that of a git revision is there while the context is open.

    Args:
        source: a folder, or a git revision with an optional folder: `HEAD~3:leaderboard/results`.

    Raises:
        UserError: there is no such folder or revision.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        yield path
        return
    with TemporaryDirectory() as folder:
        _unpack(source, Path(folder))
        yield Path(folder)


def find_trace(record: Record, folder: Path) -> Path | None:
    """The file of a record's per-token figures in a folder, without the suffix of a compressed one; None if missing."""
    if record.trace is None:
        return None
    name = glob.escape(Path(record.trace.file).name)
    matches = itertools.chain(folder.rglob(name), folder.rglob(name + SUFFIX))
    return next(iter(sorted(unpacked(path) for path in matches if path.is_file())), None)


def _read_folder(folder: Path, source: str, on_problem: Callable[[Problem], None]) -> list[Record]:
    records, problems = RecordStore(folder).read_all()
    for problem in problems:
        on_problem(problem)
    if not records:
        raise UserError(f"{source}: contains no records")
    return newest(records)


def _unpack(source: str, folder: Path) -> None:
    """Unpack the records of a revision into a folder.

    Raises:
        UserError: there is no such revision, or it has no such folder.
    """
    revision, _, inside = source.partition(":")
    command = ["git", "archive", "--format=tar", revision, "--", inside or _DEFAULT_FOLDER]
    try:
        process = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        raise UserError(f"{source}: not a file or folder, and git is not installed to look for a revision") from None
    if revision.startswith("-") or process.returncode:
        reason = process.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{source}: not a file, folder or git revision{f' ({reason[-1]})' if reason else ''}")
    with tarfile.open(fileobj=io.BytesIO(process.stdout)) as packed:
        safety: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has none
        packed.extractall(folder, **safety)
