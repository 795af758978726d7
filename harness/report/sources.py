"""Sources of records: a file, a folder, or a git revision."""

from __future__ import annotations

import glob
import io
import itertools
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Problem, Record, RecordStore, newest, published, read
from kvbench.harness.records.beside import TraceFile, open_trace

_CELL_ID = "[0-9a-f]{8,64}"  # or its beginning
_DEFAULT_FOLDER = "leaderboard/records"  # default folder in a revision


@contextmanager
def open_records(
    source: str, on_problem: Callable[[Problem], None] = lambda _: None, results: Path | None = None
) -> Iterator[tuple[list[Record], Path]]:
    """Open the newest record of every cell of a source. Yield the records and their folder, which exists inside the context.

    Args:
        source: file of a record, or a source of `open_folder`; with `results`, also the beginning of a cell id.
        on_problem: called with every file that can't be read as a record.
        results: folder in which a cell id is looked for.

    Raises:
        UserError: the source has no records.
    """
    path = Path(source).expanduser()
    if (path.is_file() and path.suffix != published.JSONL) or _cells(source, results):
        record, folder = find_record(source, results)
        yield [record], folder
        return
    with open_folder(source) as folder:
        records, problems = RecordStore(folder).read_all()
        for problem in problems:
            on_problem(problem)
        if not records:
            raise UserError(f"{source}: contains no records")
        yield newest(records), folder


def find_record(name: str, results: Path | None) -> tuple[Record, Path]:
    """Return the newest record of a cell, and the folder of its file.

    Args:
        name: file of a record, or the beginning of a cell id, of at least 8 digits.
        results: folder in which a cell id is looked for; None if `name` is a file.

    Raises:
        UserError: no record matches, several cells have ids that begin with `name`, or the file is not a record.
    """
    if not _begins_cell_id(name):
        path = Path(name).expanduser()
        record = read(path)
        if isinstance(record, Problem):
            raise UserError(f"{path}: {record.reason}")
        return record, path.parent
    files = _cells(name, results)
    matches = newest([record for _, record in files])
    if len(matches) != 1:
        count = "no record has a cell id that begins" if not matches else f"{len(matches)} cell ids begin"
        raise UserError(f"{name}: in {results}, {count} like this")
    return matches[0], next(path.parent for path, record in files if record is matches[0])


def _begins_cell_id(name: str) -> bool:
    """Return whether a name can be the beginning of a cell id, and is no file."""
    return bool(re.fullmatch(_CELL_ID, name)) and not Path(name).exists()


def _cells(name: str, results: Path | None) -> list[tuple[Path, Record]]:
    """Return the records whose cell ids begin with `name`, each with the path of its file; none if `name` is no cell id."""
    files = RecordStore(results).files() if results is not None and _begins_cell_id(name) else ()
    return [(path, r) for path, r in files if isinstance(r, Record) and r.cell_id.startswith(name)]


@contextmanager
def open_folder(source: str) -> Iterator[Path]:
    """Open a folder of records. The folder of a git revision exists only inside the context.

    Args:
        source: folder, JSONL file of a suite, or git revision with an optional folder (`HEAD~3:leaderboard/records`).

    Raises:
        UserError: the folder or revision does not exist.
    """
    path = Path(source).expanduser()
    if path.is_dir() or (path.suffix == published.JSONL and path.is_file()):
        yield path
        return
    with TemporaryDirectory() as folder:
        _unpack(source, Path(folder))
        yield Path(folder)


def find_trace(record: Record, folder: Path) -> TraceFile | None:
    """Return a record's trace in a folder or its subfolders; None if the trace is missing or no regular file."""
    if record.trace is None:
        return None
    top = folder if folder.is_dir() else folder.parent
    names = (Path(record.trace.file).name, published.suite_file(top, record).name)
    files = [*itertools.chain(*(sorted(top.rglob(glob.escape(name))) for name in names))]
    traces = (open_trace(record, path.parent) for path in files if path.is_file())
    return next((trace for trace in traces if isinstance(trace, TraceFile)), None)


def _unpack(source: str, folder: Path) -> None:
    """Unpack the records of a revision into a folder.

    Raises:
        UserError: the revision does not exist, or lacks the folder.
    """
    revision, _, inside = source.partition(":")
    command = ["git", "archive", "--format=tar", revision, "--", inside or _DEFAULT_FOLDER]
    if inside.endswith(published.JSONL):
        command[-1] = inside.removesuffix(published.JSONL) + ".*"  # both files

    try:
        process = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        raise UserError(f"{source}: not a file or folder, and git is not installed to look for a revision") from None
    if revision.startswith("-") or process.returncode:
        reason = process.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{source}: not a file, folder, git revision or known cell id{f' ({reason[-1]})' if reason else ''}")
    with tarfile.open(fileobj=io.BytesIO(process.stdout)) as packed:
        safety: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has none
        packed.extractall(folder, **safety)
