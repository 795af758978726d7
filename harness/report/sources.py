"""Where records are taken from: a file, a folder, or a revision of a git repository."""

from __future__ import annotations

import glob
import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Problem, Record, RecordStore, newest, read

IN_A_REVISION = "leaderboard/results"  # unless it says otherwise: REVISION:FOLDER


@contextmanager
def open_records(source: str, tell: Callable[[Problem], None] = lambda _: None) -> Iterator[tuple[list[Record], Path]]:
    """The newest record of every cell of a source, and the folder that has them, while it is open.

    Args:
        source: a record's file, a folder of records, or a git revision, alone or with a folder: `HEAD~3:leaderboard/results`.
        tell: is called with every file of a folder that is no record.

    Raises:
        UserError: there are no records.
    """
    path = Path(source).expanduser()
    if path.is_file():
        found = read(path)
        if isinstance(found, Problem):
            raise UserError(f"{source}: {found.reason}")
        yield [found], path.parent
    elif path.is_dir():
        yield _of_folder(path, source, tell), path
    else:
        with TemporaryDirectory() as folder:
            _unpack(source, Path(folder))
            yield _of_folder(Path(folder), source, tell), Path(folder)


def find_trace(record: Record, folder: Path) -> Path | None:
    """The file of a record's per-token figures in a folder of records, if it has one and it is there."""
    if record.trace is None:
        return None
    found = folder.rglob(glob.escape(Path(record.trace.file).name))
    return next(iter(sorted(path for path in found if path.is_file())), None)


def _of_folder(folder: Path, source: str, tell: Callable[[Problem], None]) -> list[Record]:
    records, problems = RecordStore(folder).read_all()
    for problem in problems:
        tell(problem)
    if not records:
        raise UserError(f"{source}: no records there")
    return newest(records)


def _unpack(source: str, folder: Path) -> None:
    """The records of a revision, into a folder.

    Raises:
        UserError: it is none, or has no such folder.
    """
    revision, _, inside = source.partition(":")
    command = ["git", "archive", "--format=tar", revision, "--", inside or IN_A_REVISION]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        raise UserError(f"{source}: neither a file nor a folder, and git is not there to look for a revision") from None
    if revision.startswith("-") or done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{source}: neither a file, a folder nor a git revision{f' ({reason[-1]})' if reason else ''}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as packed:
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has none
        packed.extractall(folder, **safely)
