"""The folder that holds records: one file a cell, written atomically. Imports no torch."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write, put_in_place, remove_partials
from kvbench.harness.records.facts import Trace
from kvbench.harness.records.record import AHEAD, Problem, Record, moment, read, slug

LOCK = ".running"  # in a suite's folder while a run measures into it


class RecordStore:
    """The folder of records: `<suite>/<model>/<policy>-<capacity>-<cell id>-<key>.json`."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which need not exist."""
        self.folder = folder

    def path(self, record: Record) -> Path:
        """Where a record belongs."""
        cell = record.cell
        return self.folder / slug(cell.suite) / slug(cell.model.id) / f"{record.stem}.json"

    def trace_path(self, record: Record, suffix: str = ".nll.npy") -> Path:
        """Where its per-token or per-question figures belong."""
        return self.path(record).with_suffix(suffix)

    @contextmanager
    def locked(self, suite: str) -> Iterator[None]:
        """While one run measures a suite into this folder, no other does.

        Raises:
            UserError: another run does, or the folder can't be written to.
        """
        from filelock import FileLock, Timeout

        lock = self.folder / slug(suite) / LOCK
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock, timeout=0):
                remove_partials(lock.parent)
                yield
        except Timeout:
            raise UserError(
                f"another run measures suite {suite} into {self.folder}: wait for its end, or give --results another folder"
            ) from None
        except OSError as error:
            if error.filename is None or Path(error.filename) not in (lock, lock.parent):
                raise
            raise UserError(f"{lock.parent}: can't be written to ({error.strerror})") from error

    def stamp(self, record: Record, now: datetime.datetime) -> str:
        """When a record was finished: now, but after every earlier record of its cell, whatever the clock does.

        Args:
            record: that is about to be written.
            now: in UTC.

        Raises:
            UserError: one of them is finished more than a day ahead of now.
        """
        latest = now
        for path in self.path(record).parent.glob(f"*-{record.cell_id[:8]}-*.json"):
            found = read(path)
            if isinstance(found, Problem) or found.cell_id != record.cell_id:
                continue
            then = moment(found.finished)
            if then is not None and then > now + AHEAD:
                raise UserError(f"{path}: finished {found.finished}, and it is {now:%Y-%m-%d %H:%M} UTC: is this clock right?")
            latest = max(latest, then + datetime.timedelta(seconds=1)) if then is not None and then >= now else latest
        return latest.isoformat(timespec="seconds")

    def write(self, record: Record, trace: Path | None = None, suffix: str = ".nll.npy") -> Path:
        """Put a record in place, atomically; its finished trace first, so that no record lacks one.

        Args:
            record: to write.
            trace: its finished trace, which is moved; None if there is none.
            suffix: of the trace's name from then on.

        Raises:
            OSError: the folder can't be written to.
        """
        path = self.path(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        if trace is not None:
            target = self.trace_path(record, suffix)
            record.trace = Trace(file=target.name, sha256=hashlib.sha256(trace.read_bytes()).hexdigest())
            put_in_place(trace, target)
        with atomic_write(path) as file:
            json.dump(record.as_json(), file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
        return path

    def finished(self, record: Record) -> Record | None:
        """The record that already answers this one's cell with the same key, if its trace is still there."""
        found = read(self.path(record))
        if isinstance(found, Problem) or found.status != "ok" or (found.cell_id, found.key) != (record.cell_id, record.key):
            return None
        return found if found.trace is None or (self.path(found).parent / found.trace.file).exists() else None

    def files(self) -> Iterator[tuple[Path, Record | Problem]]:
        """Every file of the folder with the record in it, or with what is wrong with it, in the order of their paths.

        Raises:
            UserError: it is not a folder.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder}: a file; give the folder of the records")
        for path in sorted(self.folder.rglob("*.json")):
            yield path, read(path)

    def read_all(self) -> tuple[list[Record], list[Problem]]:
        """Every record, in the order of their paths, and every file that is none."""
        found = [file for _, file in self.files()]
        return [f for f in found if isinstance(f, Record)], [f for f in found if isinstance(f, Problem)]
