"""A folder of records: one file per cell, or two files per suite. Imports no torch."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import OWNER_SUFFIX, HeldError, atomic_write, locked, remove_partials, store_content
from kvbench.harness.records import published
from kvbench.harness.records.beside import TraceFile, open_trace
from kvbench.harness.records.record import MAX_CLOCK_SKEW, Problem, Record, parse_time, read, slug
from kvbench.harness.records.run_facts import RecordedTrace

LOCK = ".running"  # lock file in a suite's folder during a run


_ARRAYS = (".nll.npy", ".attention.npz", ".divergence.npy")  # traces with a number per token, which hardly compress
_EARLIEST = datetime.datetime.min.replace(tzinfo=datetime.UTC)
FEED = "feed.json"  # stored with the pages, possibly in the folder of records; no record has this name


class RecordStore:
    """A folder of records: a working folder, a published folder, or both in one.

    A working folder has a file per cell, `<suite>/<model>/<policy>-<capacity>-<cell id>-<key>.json`, with its trace beside it.
    A published folder has two files per suite, `<suite>.jsonl` and `<suite>.parquet` (`published.py`).
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder, which need not exist yet, or the JSONL file of a published suite."""
        self.folder = folder

    def path(self, record: Record) -> Path:
        """Return the path of a record in a working folder."""
        cell = record.cell
        return self.folder / slug(cell.suite) / slug(cell.model.id) / f"{record.stem}.json"

    def trace_path(self, record: Record, suffix: str = ".nll.npy") -> Path:
        """Return the path of a record's trace in a working folder."""
        return self.path(record).with_suffix(suffix)

    @contextmanager
    def locked(self, suite: str) -> Iterator[None]:
        """Keep other runs from measuring the same suite into this folder.

        Raises:
            UserError: another run is measuring it, or the folder can't be written to.
        """
        lock = self.folder / slug(suite) / LOCK
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with locked(lock):
                remove_partials(lock.parent)
                yield
        except HeldError as error:
            owner = f" ({error})" if str(error) else ""
            raise UserError(
                f"another run is measuring suite {suite} into {self.folder}{owner}: "
                "wait for it, or pass another folder to --results"
            ) from None
        except OSError as error:
            owner_file = lock.with_name(lock.name + OWNER_SUFFIX)
            if error.filename is None or Path(error.filename) not in (lock, owner_file, lock.parent):
                raise
            raise UserError(f"{lock.parent}: can't be written to ({error.strerror})") from error

    def stamp(self, record: Record, now: datetime.datetime) -> str:
        """Return the time for a finished record: now, or a second after the cell's latest record if that time is later.

        Raises:
            UserError: another record of the cell is dated more than a day in the future.
        """
        latest = now
        named = f"*-{record.cell_id[:8]}-*.json"
        others = [(path, read(path)) for path in self.path(record).parent.glob(named)]
        for path, other in [*others, *self._published(record)]:
            if isinstance(other, Problem) or other.cell_id != record.cell_id:
                continue
            then = parse_time(other.finished)
            if then is not None and then > now + MAX_CLOCK_SKEW:
                raise UserError(
                    f"{path}: finished {other.finished}, but it is {now:%Y-%m-%d %H:%M} UTC now: is this machine's clock right?"
                )
            latest = max(latest, then + datetime.timedelta(seconds=1)) if then is not None and then >= now else latest
        return latest.isoformat(timespec="seconds")

    def write(self, record: Record, trace: Path | bytes | None = None, suffix: str = ".nll.npy") -> Path:
        """Write a record atomically. The trace is written first, so that no record lacks its trace.

        Args:
            trace: the finished trace, either a file to be moved or its content; None if there is no trace.

        Raises:
            OSError: the folder can't be written to.
        """
        path = self.path(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        if trace is not None:
            target = self.trace_path(record, suffix)
            record.trace = RecordedTrace(file=target.name, sha256=store_content(trace, target))
        with atomic_write(path) as file:
            file.write(record.as_text())
        return path

    def finished(self, record: Record, keep_map: str | None = None) -> Record | None:
        """Return the stored record with the same cell and key, if it succeeded and its files still exist; else None.

        Args:
            keep_map: steps whose keep map the record must have; None requires no keep map.
        """
        path = self.path(record)
        for place, stored in ((path, read(path)), *self._published(record)):
            if isinstance(stored, Problem) or stored.status != "ok":
                continue
            if (stored.cell_id, stored.key) == (record.cell_id, record.key) and _is_whole(stored, place.parent, keep_map):
                return stored
        return None

    def _published(self, record: Record) -> list[tuple[Path, Record]]:
        """Return the published records of a cell."""
        suite = published.suite_of(self.folder, record)
        return [] if suite is None else [(suite.path, other) for other in suite.having(record.cell_id)]

    def files(self) -> Iterator[tuple[Path, Record | Problem]]:
        """Yield every record of the folder with its file, or the problem of that file, ordered by path.

        The path of a published record names a line, such as `zoo.jsonl:17`. `open_trace` takes the path's parent.

        Raises:
            UserError: the folder is a file other than the JSONL file of a published suite.
        """
        is_suite = self.folder.suffix == published.JSONL
        if self.folder.exists() and not (self.folder.is_dir() or is_suite):
            raise UserError(f"{self.folder} is a file; pass the folder that holds the records")
        for path in [self.folder] if is_suite and self.folder.exists() else sorted(_record_files(self.folder)):
            if path.suffix == published.JSONL:
                suite = published.load(path)
                yield from [(suite.path, suite)] if isinstance(suite, Problem) else suite.records()
            elif path.name != FEED:
                yield path, read(path)

    def read_all(self) -> tuple[list[Record], list[Problem]]:
        """Return all records, and the problems of files that are no records, ordered by path."""
        contents = [content for _, content in self.files()]
        return [x for x in contents if isinstance(x, Record)], [x for x in contents if isinstance(x, Problem)]


def publish(source: Path, target: Path, arrays: bool = False) -> dict[str, int]:
    """Copy the records of a folder into a published folder. Return the number of new or changed records of each suite.

    A record replaces a record of the same cell and key that is not newer. Records of the same cell with other keys stay.

    Args:
        source: folder of either form.
        target: published folder.
        arrays: whether to publish traces with a number per token, too (`.nll.npy`, `.attention.npz`, `.divergence.npy`).

    Raises:
        UserError: a file is no record, or a trace has changed since the measurement.
        OSError: the target can't be written to.
    """
    changed: dict[Path, list[tuple[Path, Record]]] = {}
    for path, record in RecordStore(source).files():
        if isinstance(record, Problem):
            raise UserError(f"{path}: {record.reason}")
        changed.setdefault(published.suite_file(target, record), []).append((path, record))
    return {path.stem: _publish_suite(path, records, arrays) for path, records in changed.items()}


def _publish_suite(path: Path, records: list[tuple[Path, Record]], arrays: bool) -> int:
    """Merge records into the files of one suite. Return the number of new or changed records.

    Args:
        path: path of the suite's JSONL file.
    """
    known: dict[tuple[str, str], published.Published] = {}
    for place, record in RecordStore(path).files():
        if isinstance(record, Problem):
            raise UserError(f"{place}: {record.reason}")
        known[record.cell_id, record.key] = published.Published(record, _content(record, place.parent))
    before = dict(known)
    for place, record in records:
        key, content = (record.cell_id, record.key), None
        if arrays or record.trace is None or not record.trace.file.endswith(_ARRAYS):
            content = _content(record, place.parent)
        old = known.get(key)
        if old is None or (parse_time(old.record.finished) or _EARLIEST) <= (parse_time(record.finished) or _EARLIEST):
            same = old is not None and old.record.trace == record.trace
            known[key] = published.Published(record, old.trace if old is not None and same and content is None else content)
    count = sum(before.get(key) != entry for key, entry in known.items())
    if count:
        path.parent.mkdir(parents=True, exist_ok=True)
        published.write(path, known.values())
    return count


def _content(record: Record, folder: Path) -> bytes | None:
    """Return the content of a record's trace; None if there is no trace.

    Raises:
        UserError: the trace can't be read, or has changed since the measurement.
    """
    trace = open_trace(record, folder)
    if trace is None or record.trace is None:
        return None
    problem = trace.reason if isinstance(trace, Problem) else trace.problem(record.trace.sha256)
    if isinstance(trace, Problem) or problem:
        raise UserError(f"{trace.path}: {problem}")
    return trace.getvalue()


def _is_whole(record: Record, folder: Path, keep_map: str | None) -> bool:
    """Return whether a record's trace exists and, if `keep_map` names steps, a keep map of these steps."""
    if keep_map is not None:
        kept = record.facts.keep_map
        if kept is None or kept.steps != keep_map or not (folder / kept.file).exists():
            return False
    return record.trace is None or isinstance(open_trace(record, folder), TraceFile)


def _record_files(folder: Path) -> Iterator[Path]:
    """Yield files that may be records. Hidden folders, Python environments and links to folders are left out."""
    if not folder.is_dir() or (folder / "pyvenv.cfg").exists():
        return
    for entry in os.scandir(folder):
        path = folder / entry.name
        if path.suffix == ".json" or (path.suffix == published.JSONL and entry.is_file() and published.is_published(path)):
            yield path
        elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _record_files(path)
