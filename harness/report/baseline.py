"""Baselines: folders of records that later runs are held to. Nothing but a baseline is ever replaced by one."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.records import LOCK, Problem, Record, RecordStore, read
from kvbench.harness.report.baseline_file import FILE, Baseline, CellFiles, OutdatedBaselineError, parse, text


def load(folder: Path) -> tuple[Baseline, list[Record]]:
    """A baseline and its records, every file held to its hash.

    Raises:
        UserError: it is none; or a record or trace is missing, changed, or not one of its own.
    """
    _bring_back(folder)
    baseline = parse(folder / FILE)
    records = [_own_record(folder, cell_id, files) for cell_id, files in baseline.cells.items()]
    listed = {folder / files.record for files in baseline.cells.values()}
    extra = sorted(set(folder.rglob("*.json")) - listed)
    if extra:
        raise UserError(f"{extra[0]}: no record of the baseline: {FILE} does not list it")
    return baseline, records


def store(folder: Path, baseline: Baseline, records: Path) -> None:
    """Put a baseline in the place of what is there: whatever happens, the old or the new one is there afterwards.

    Args:
        folder: of the baseline.
        baseline: what it says; its `cells` are listed here.
        records: folder of its records and traces on the same file system, which is moved.

    Raises:
        UserError: something else than a baseline is there.
    """
    target = replaceable(folder)
    for lock in records.rglob(LOCK):
        lock.unlink()
    baseline = baseline.model_copy(update={"cells": _listed(records)})
    with atomic_write(records / FILE) as file:
        file.write(text(baseline))
    target.parent.mkdir(parents=True, exist_ok=True)
    _exchange(target, records)


def replaceable(folder: Path) -> Path:
    """Where a baseline may be put: a folder that is missing, empty, or holds a baseline and nothing else.

    Returns:
        The folder, resolved.

    Raises:
        UserError: something else is there.
    """
    target = folder.resolve()
    if Path.cwd().is_relative_to(target):
        raise UserError(f"{folder}: the current directory is in it, and a baseline replaces its folder: name another")
    _bring_back(target)
    if not target.exists():
        return target
    if not target.is_dir():
        raise UserError(f"{folder}: a file; a baseline is a folder: name a new or an empty one")
    strangers = list(_strangers(target))
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise UserError(
            f"{folder}: holds {strangers[0]}{more}, which is no baseline's: name a new or an empty folder; nothing was touched"
        )
    return target


def _own_record(folder: Path, cell_id: str, files: CellFiles) -> Record:
    """A record that the baseline lists, if it and its trace are what was measured."""
    for name, expected in ((files.record, files.sha256), (files.trace, files.trace_sha256)):
        if name is None:
            continue
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing, though {FILE} lists it: restore it, or make the baseline anew")
        if _sha256(path) != expected:
            raise UserError(
                f"{path}: not what was measured (another sha256 than in {FILE}): restore it, or make the baseline anew"
            )
    record = read(folder / files.record)
    if isinstance(record, Problem):
        raise UserError(f"{folder}: a baseline that can't be read ({record.path.name}: {record.reason})")
    if (record.cell_id, record.status) != (cell_id, files.status):
        raise UserError(f"{folder / files.record}: of another cell or status than {FILE} says")
    if (record.trace.sha256 if record.trace else None) != files.trace_sha256:
        raise UserError(f"{folder / files.record}: of another trace than {FILE} says")
    return record


def _listed(folder: Path) -> dict[str, CellFiles]:
    """The records of a folder and their traces, with their hashes."""
    store = RecordStore(folder)
    records, problems = store.read_all()
    if problems or not records:
        raise UserError(f"{folder}: {f'{problems[0].path.name}: {problems[0].reason}' if problems else 'no records'}")
    listed = {}
    for record in records:
        path = store.path(record)
        trace = path.parent / Path(record.trace.file).name if record.trace else None
        if record.cell_id in listed or not path.exists() or (trace and not trace.exists()):
            raise UserError(f"{path}: a second record of its cell, one in another place, or one without its trace")
        listed[record.cell_id] = CellFiles(
            status=record.status, record=path.relative_to(folder).as_posix(), sha256=_sha256(path),
            trace=trace.relative_to(folder).as_posix() if trace else None, trace_sha256=_sha256(trace) if trace else None,
        )  # fmt: skip
    return listed


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _strangers(folder: Path) -> Iterator[Path]:
    """What a folder holds besides a baseline: everything, if it holds none."""
    own = _own_files(folder)
    for root, folders, files in os.walk(folder):
        here = Path(root)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in [*files, *links]):
            if path.is_symlink() or path not in own:
                yield path.relative_to(folder)
        if here != folder and not folders and not files:
            yield here.relative_to(folder)


def _own_files(folder: Path) -> set[Path]:
    """The files of the baseline in a folder, whether or not they are whole; none if there is no baseline."""
    own = {folder / FILE, *folder.rglob(LOCK)}
    try:
        listed = parse(folder / FILE).cells.values()
    except OutdatedBaselineError:
        records = [(path, record) for path in folder.rglob("*.json") if isinstance(record := read(path), Record)]
        return own | {p for p, _ in records} | {p.parent / Path(r.trace.file).name for p, r in records if r.trace}
    except UserError:
        return set()
    return own | {folder / name for files in listed for name in (files.record, files.trace) if name}


def _exchange(target: Path, records: Path) -> None:
    """Move the old baseline aside, the new one in its place, and only then delete the old one."""
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.old")
    if target.exists():
        target.rename(aside)
    try:
        strangers = list(_strangers(aside)) if aside.exists() else []  # nobody can put anything in it any more
        if strangers:
            raise UserError(f"{target}: {strangers[0]} was put there meanwhile; the old baseline stays")
        records.rename(target)
    except BaseException:
        if aside.exists():
            aside.rename(target)
        raise
    if aside.exists():
        shutil.rmtree(aside)


def _bring_back(folder: Path) -> None:
    """Finish what a killed update left: the old baseline beside the place where none is."""
    if folder.exists() or not folder.parent.is_dir():
        return
    for left in sorted(folder.parent.iterdir()):
        if left.name.startswith(f".{folder.name}.") and left.suffix == ".old" and left.is_dir() and not any(_strangers(left)):
            left.rename(folder)
            return
