"""The folder of records: one file per cell, written atomically. Imports no torch."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.harness.core import packed
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write, put_in_place, remove_partials
from kvbench.harness.core.locks import OWNER_SUFFIX, HeldError, locked
from kvbench.harness.records.beside import files_beside
from kvbench.harness.records.facts import Trace
from kvbench.harness.records.record import MAX_CLOCK_SKEW, Problem, Record, parse_time, read, slug

LOCK = ".running"  # lock file in a suite's folder during a run


FEED = "feed.json"  # lies beside the pages, so it may be in the folder of records; no record has this name


class RecordStore:
    """The folder of records: `<suite>/<model>/<policy>-<capacity>-<cell id>-<key>.json`, or the same with `.bz2`."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which need not exist yet."""
        self.folder = folder

    def path(self, record: Record) -> Path:
        """Where a record is stored."""
        cell = record.cell
        return self.folder / slug(cell.suite) / slug(cell.model.id) / f"{record.stem}.json"

    def trace_path(self, record: Record, suffix: str = ".nll.npy") -> Path:
        """Where its trace is stored."""
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
        """The time to write into a finished record: now, or a second after the cell's latest record if that is later.

        Args:
            record: about to be written.
            now: in UTC.

        Raises:
            UserError: another record of the cell lies more than a day in the future.
        """
        latest = now
        named = f"*-{record.cell_id[:8]}-*.json"
        for path in itertools.chain(*(self.path(record).parent.glob(named + end) for end in ("", packed.SUFFIX))):
            other = read(path)
            if isinstance(other, Problem) or other.cell_id != record.cell_id:
                continue
            then = parse_time(other.finished)
            if then is not None and then > now + MAX_CLOCK_SKEW:
                raise UserError(
                    f"{path}: finished {other.finished}, but it is {now:%Y-%m-%d %H:%M} UTC now: is this machine's clock right?"
                )
            latest = max(latest, then + datetime.timedelta(seconds=1)) if then is not None and then >= now else latest
        return latest.isoformat(timespec="seconds")

    def write(self, record: Record, trace: Path | None = None, suffix: str = ".nll.npy") -> Path:
        """Write a record atomically. Its trace comes first, so that no record lacks its trace.

        Args:
            record: to write.
            trace: the finished trace, which is moved here; None if there is none.

        Raises:
            OSError: the folder can't be written to.
        """
        path = self.path(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        if trace is not None:
            target = self.trace_path(record, suffix)
            record.trace = Trace(file=target.name, sha256=hashlib.sha256(trace.read_bytes()).hexdigest())
            put_in_place(trace, target)
            packed.packed(target).unlink(missing_ok=True)
        with atomic_write(path) as file:
            json.dump(record.as_json(), file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
        packed.packed(path).unlink(missing_ok=True)
        return path

    def finished(self, record: Record, keep_map: str | None = None) -> Record | None:
        """The stored record with the same cell and key, if it went well and its files still exist.

        Args:
            keep_map: it must have a keep map of these steps, too; it need not when None.
        """
        stored = read(self.path(record))
        if isinstance(stored, Problem) or stored.status != "ok" or (stored.cell_id, stored.key) != (record.cell_id, record.key):
            return None
        named = [] if stored.trace is None else [stored.trace.file]
        if keep_map is not None:
            if stored.facts.keep_map is None or stored.facts.keep_map.steps != keep_map:
                return None
            named.append(stored.facts.keep_map.file)
        return stored if all(packed.stored(self.path(stored).parent / name).exists() for name in named) else None

    def files(self) -> Iterator[tuple[Path, Record | Problem]]:
        """Every file of the folder with its record, or its problem, ordered by path. A compressed one has the plain one's path.

        Raises:
            UserError: the folder is a file.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file; pass the folder that holds the records")
        for path in sorted(set(_json_files(self.folder))):
            if path.name != FEED:
                yield path, read(path)

    def read_all(self) -> tuple[list[Record], list[Problem]]:
        """All records, and the problems of all other files, ordered by path."""
        contents = [content for _, content in self.files()]
        return [x for x in contents if isinstance(x, Record)], [x for x in contents if isinstance(x, Problem)]


def pack(folder: Path) -> Iterator[Path]:
    """Compress the records of a folder and their traces of JSON lines where they lie. Yields the compressed files.

    Arrays stay as they are: they hardly get smaller, and are mapped into memory.

    Raises:
        UserError: the folder is a file.
        OSError: it can't be written to.
    """
    for path, record in RecordStore(folder).files():
        if isinstance(record, Record):
            lines = [path.with_name(part.file) for part in files_beside(record) if part.file.endswith(".jsonl")]
            for file in (*lines, path):
                if file.is_file() and not file.is_symlink():
                    yield packed.write_packed(file, file.read_bytes())


def _json_files(folder: Path) -> Iterator[Path]:
    """Files that may be records. Hidden folders, Python environments and links to folders are not ours to read."""
    if not folder.is_dir() or (folder / "pyvenv.cfg").exists():
        return
    for entry in os.scandir(folder):
        if entry.name.endswith((".json", f".json{packed.SUFFIX}")):
            yield packed.unpacked(folder / entry.name)
        elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _json_files(folder / entry.name)
