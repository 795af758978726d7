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
from kvbench.harness.records import Problem, Record, RecordStore, newest, published, read
from kvbench.harness.records.beside import TraceFile, open_trace

_DEFAULT_FOLDER = "leaderboard/records"  # default folder in a revision


@contextmanager
def open_records(source: str, on_problem: Callable[[Problem], None] = lambda _: None) -> Iterator[tuple[list[Record], Path]]:
    """Open the newest record of every cell of a source. Yield the records and their folder, which exists inside the context.

    Args:
        source: file of a record, or a source of `open_folder`.
        on_problem: called with every file that can't be read as a record.

    Raises:
        UserError: the source has no records.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix != published.JSONL:
        record = read(path)
        if isinstance(record, Problem):
            raise UserError(f"{source}: {record.reason}")
        yield [record], path.parent
    else:
        with open_folder(source) as folder:
            records, problems = RecordStore(folder).read_all()
            for problem in problems:
                on_problem(problem)
            if not records:
                raise UserError(f"{source}: contains no records")
            yield newest(records), folder


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
        raise UserError(f"{source}: not a file, folder or git revision{f' ({reason[-1]})' if reason else ''}")
    with tarfile.open(fileobj=io.BytesIO(process.stdout)) as packed:
        safety: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has none
        packed.extractall(folder, **safety)
