"""Baselines: folders of records that later runs are compared with. Writing one replaces nothing but a baseline."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.packed import digest, stored, unpacked
from kvbench.harness.records import LOCK, Problem, Record, RecordStore, read
from kvbench.harness.report.gate_times import Band

FILE = "baseline.yaml"
_HEAD = "# Written by `bench baseline update`; don't edit.\n"
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
_SHA256 = Field(pattern="^[0-9a-f]{64}$")


class OutdatedBaselineError(UserError):
    """A baseline in the format from before hashes."""


class MeasuredWith(BaseModel):
    """Options of `bench run` that changed the suite; none is an absolute path.

    Attributes:
        model: hub id, or name of a built-in model.
        local_model: folder name of a local model; `bench check --model` says where it is.
        policies: replace the suite's.
        settings: key=value.
        device: unless "auto".
        dtype: of weights and cache.
        threads: of the CPU.
    """

    model_config = _STRICT

    model: str | None = None
    local_model: str | None = None
    policies: list[str] = []
    settings: list[str] = []
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    threads: int | None = Field(None, ge=1)


class CellFiles(BaseModel):
    """The files of a cell, relative to the baseline's folder, and their hashes.

    Attributes:
        status: of the record.
        record: its file.
        sha256: of the record's file.
        trace: the trace's file, if there is one.
        trace_sha256: of the trace's file.
    """

    model_config = _STRICT

    status: Literal["ok", "failed"]
    record: str
    sha256: str = _SHA256
    trace: str | None = None
    trace_sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")

    @field_validator("record", "trace")
    @classmethod
    def _inside(cls, value: str | None) -> str | None:
        if value is not None and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
            raise ValueError(f"'{value}' is not inside the baseline")
        return value

    @model_validator(mode="after")
    def _trace_with_hash(self) -> CellFiles:
        if (self.trace is None) != (self.trace_sha256 is None):
            raise ValueError("a trace without its hash, or a hash without its trace")
        return self


class Baseline(BaseModel):
    """Description of a baseline, stored beside its records.

    Attributes:
        suite: name of the measured suite, or its file relative to the baseline's folder.
        options: overrides of the suite.
        who: author of the baseline.
        when: ISO 8601, UTC.
        why: reason for making it, in a sentence.
        cells: its files, by cell id.
        bands: noise bands of latency, by cell id.
    """

    model_config = _STRICT

    suite: str
    options: MeasuredWith = MeasuredWith()
    who: str
    when: str
    why: str
    cells: dict[str, CellFiles] = Field({}, min_length=1)
    bands: dict[str, Band] = {}


def parse(path: Path) -> Baseline:
    """Read `baseline.yaml`.

    Raises:
        UserError: the file is missing or not a baseline.
        OutdatedBaselineError: it has no hashes.
    """
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path.parent}: no baseline ({FILE} is missing); 'bench baseline update' makes one") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a baseline ({type(error).__name__})") from None
    if isinstance(value, dict) and {"suite", "why"} <= set(value) and "cells" not in value:
        raise OutdatedBaselineError(f"{path}: has no hashes of its records: make it again with 'bench baseline update'")
    try:
        return Baseline.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise UserError(f"{path}: not a baseline ({f'{where}: ' if where else ''}{first['msg'].lower()})") from None


def text(baseline: Baseline) -> str:
    """The content of `baseline.yaml`."""
    plain = baseline.model_dump(exclude_defaults=True) | {"options": baseline.options.model_dump(exclude_defaults=True)}
    return _HEAD + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


def load(folder: Path) -> tuple[Baseline, list[Record]]:
    """Read a baseline and its records, and check the hash of every file.

    Raises:
        UserError: it is not a baseline, or a record or trace is missing, changed or not listed.
    """
    _recover(folder)
    baseline = parse(folder / FILE)
    records = [_read_listed(folder, cell_id, files) for cell_id, files in baseline.cells.items()]
    listed = {folder / files.record for files in baseline.cells.values()}
    extra = sorted({path for path, _ in RecordStore(folder).files()} - listed)
    if extra:
        raise UserError(f"{extra[0]}: {FILE} does not list this record: move it out of the baseline")
    return baseline, records


def store(folder: Path, baseline: Baseline, records: Path) -> None:
    """Write a baseline to a folder. If writing fails or is killed, the old baseline survives.

    Args:
        folder: where to put it.
        baseline: its description; `cells` is filled in here.
        records: folder of its records and traces, on the same file system; it is moved.

    Raises:
        UserError: the folder holds something other than a baseline.
    """
    target = replaceable(folder)
    for lock in records.rglob(LOCK):
        lock.unlink()
    baseline = baseline.model_copy(update={"cells": _list_files(records)})
    with atomic_write(records / FILE) as file:
        file.write(text(baseline))
    target.parent.mkdir(parents=True, exist_ok=True)
    _exchange(target, records)


def replaceable(folder: Path) -> Path:
    """The resolved folder, if a baseline may be written there: it is missing, empty, or holds only a baseline.

    Raises:
        UserError: it holds something else.
    """
    target = folder.resolve()
    if Path.cwd().is_relative_to(target):
        raise UserError(f"{folder}: contains the current directory, and would be replaced: name another folder")
    _recover(target)
    if not target.exists():
        return target
    if not target.is_dir():
        raise UserError(f"{folder}: is a file; a baseline needs a folder: name a new or empty one")
    foreign = list(_foreign_files(target))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UserError(
            f"{folder}: holds {foreign[0]}{more}, not part of a baseline: name a new or empty folder; nothing was changed"
        )
    return target


def _read_listed(folder: Path, cell_id: str, files: CellFiles) -> Record:
    """Read a record that the baseline lists; it and its trace must match their hashes."""
    for name, expected in ((files.record, files.sha256), (files.trace, files.trace_sha256)):
        if name is None:
            continue
        path = folder / name
        if not stored(path).is_file():
            raise UserError(f"{path}: missing, but listed in {FILE}: restore it, or make a new baseline")
        if digest(path) != expected:
            raise UserError(
                f"{path}: has changed since it was measured (sha256 differs from {FILE}): restore it, or make a new baseline"
            )
    record = read(folder / files.record)
    if isinstance(record, Problem):
        raise UserError(f"{folder}: the baseline can't be read ({record.path.name}: {record.reason})")
    if (record.cell_id, record.status) != (cell_id, files.status):
        raise UserError(f"{folder / files.record}: its cell or status differs from {FILE}")
    if (record.trace.sha256 if record.trace else None) != files.trace_sha256:
        raise UserError(f"{folder / files.record}: its trace differs from {FILE}")
    return record


def _list_files(folder: Path) -> dict[str, CellFiles]:
    """List all records and traces of a folder, with their hashes."""
    store = RecordStore(folder)
    records, problems = store.read_all()
    if problems or not records:
        raise UserError(f"{folder}: {f'{problems[0].path.name}: {problems[0].reason}' if problems else 'no records'}")
    listed = {}
    for record in records:
        path = store.path(record)
        trace = path.parent / Path(record.trace.file).name if record.trace else None
        if record.cell_id in listed or not stored(path).exists() or (trace and not stored(trace).exists()):
            raise UserError(f"{path}: a duplicate record of its cell, misplaced, or without its trace")
        listed[record.cell_id] = CellFiles(
            status=record.status, record=path.relative_to(folder).as_posix(), sha256=digest(path),
            trace=trace.relative_to(folder).as_posix() if trace else None, trace_sha256=digest(trace) if trace else None,
        )  # fmt: skip
    return listed


def _foreign_files(folder: Path) -> Iterator[Path]:
    """Yield the paths in a folder that don't belong to a baseline: all of them if there is no baseline."""
    expected = _baseline_files(folder)
    for root, folders, files in os.walk(folder):
        here = Path(root)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in [*files, *links]):
            if path.is_symlink() or unpacked(path) not in expected:
                yield path.relative_to(folder)
        if here != folder and not folders and not files:
            yield here.relative_to(folder)


def _baseline_files(folder: Path) -> set[Path]:
    """The files that belong to the baseline in a folder, even if damaged; none if there is no baseline."""
    own = {folder / FILE, *folder.rglob(LOCK)}
    try:
        listed = parse(folder / FILE).cells.values()
    except OutdatedBaselineError:
        records = [(path, record) for path, record in RecordStore(folder).files() if isinstance(record, Record)]
        return own | {p for p, _ in records} | {p.parent / Path(r.trace.file).name for p, r in records if r.trace}
    except UserError:
        return set()
    return own | {folder / name for files in listed for name in (files.record, files.trace) if name}


def _exchange(target: Path, records: Path) -> None:
    """Move the old baseline aside, put the new one in its place, then delete the old one."""
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.old")
    if target.exists():
        target.rename(aside)
    try:
        foreign = list(_foreign_files(aside)) if aside.exists() else []  # after the rename, nobody adds files
        if foreign:
            raise UserError(f"{target}: {foreign[0]} was added during the update; the old baseline is kept")
        records.rename(target)
    except BaseException:
        if aside.exists():
            aside.rename(target)
        raise
    if aside.exists():
        shutil.rmtree(aside)


def _recover(folder: Path) -> None:
    """Move the old baseline back if a killed update moved it aside."""
    if folder.exists() or not folder.parent.is_dir():
        return
    for left in sorted(folder.parent.iterdir()):
        if left.name.startswith(f".{folder.name}.") and left.suffix == ".old" and left.is_dir() and not any(_foreign_files(left)):
            left.rename(folder)
            return
