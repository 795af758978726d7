"""Baselines: folders of records that later runs are compared with. Writing one replaces nothing but a baseline."""

from __future__ import annotations

import hashlib
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
from kvbench.harness.records import LOCK, Problem, Record, RecordStore, publish, published
from kvbench.harness.records.beside import TraceFile, open_trace
from kvbench.harness.report.gate_times import Band

FILE = "baseline.yaml"
_HEAD = "# Written by `bench baseline update`; don't edit.\n"
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
_SHA256 = Field(pattern="^[0-9a-f]{64}$")


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
    """The files of a cell as a working folder has them, with their hashes. A baseline holds the content of these files.

    Attributes:
        status: of the record.
        record: its file, such as `suite/model/name.json`.
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
    """
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path.parent}: no baseline ({FILE} is missing); 'bench baseline update' makes one") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a baseline ({type(error).__name__})") from None
    try:
        return Baseline.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part)[:40] for part in first["loc"])
        raise UserError(f"{path}: not a baseline ({f'{field}: ' if field else ''}{first['msg'].lower()})") from None


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
    stored = {record.cell_id: (path, record) for path, record in _stored(folder)}
    for cell_id, (path, _) in stored.items():
        if cell_id not in baseline.cells:
            raise UserError(f"{path}: {FILE} does not list this record: move it out of the baseline")
    for cell_id, listed in baseline.cells.items():
        path, record = stored.get(cell_id, (folder / listed.record, None))
        files = None if record is None else _files(folder, path, record)
        if files is None or (files.trace is None and listed.trace is not None):
            file = listed.record if files is None else listed.trace
            raise UserError(f"{folder / str(file)}: missing, but listed in {FILE}: restore it, or make a new baseline")
        if files != listed:
            changed = path if files.sha256 != listed.sha256 or listed.trace is None else folder / listed.trace
            raise UserError(
                f"{changed}: has changed since it was measured (differs from {FILE}): restore it, or make a new baseline"
            )
    return baseline, [stored[cell_id][1] for cell_id in baseline.cells]


def store(folder: Path, baseline: Baseline, records: Path) -> None:
    """Write a baseline to a folder. If writing fails or is killed, the old baseline survives.

    Args:
        folder: where to put it.
        baseline: its description; `cells` is filled in here.
        records: working folder of its records and traces, on the same file system as `folder`; it is published.

    Raises:
        UserError: the folder holds something other than a baseline.
    """
    target = replaceable(folder)
    baseline = baseline.model_copy(update={"cells": _list_files(records)})
    files = records.with_name(f"{records.name}.published")
    publish(records, files, arrays=True)
    with atomic_write(files / FILE) as file:
        file.write(text(baseline))
    target.parent.mkdir(parents=True, exist_ok=True)
    _exchange(target, files)


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


def _stored(folder: Path) -> Iterator[tuple[Path, Record]]:
    """Yield the records of a baseline, each with its file.

    Raises:
        UserError: a file can't be read as a record, or two are of the same cell.
    """
    paths: dict[str, Path] = {}
    for path, record in RecordStore(folder).files():
        if isinstance(record, Problem):
            raise UserError(f"{path}: the baseline can't be read ({record.reason})")
        if paths.setdefault(record.cell_id, path) != path:
            raise UserError(f"{path}: a record of the same cell as {paths[record.cell_id]}: remove one of them")
        yield path, record


def _files(folder: Path, path: Path, record: Record) -> CellFiles:
    """Return the files of a record and their hashes; without its trace if that is missing or unreadable."""
    name, opened = RecordStore(folder).path(record).relative_to(folder), open_trace(record, path.parent)
    trace = (record.trace, opened) if record.trace is not None and isinstance(opened, TraceFile) else None
    return CellFiles(
        status=record.status,
        record=name.as_posix(),
        sha256=hashlib.sha256(record.as_text().encode()).hexdigest(),
        trace=None if trace is None else name.with_name(trace[0].file).as_posix(),
        trace_sha256=None if trace is None else hashlib.sha256(trace[1].getbuffer()).hexdigest(),
    )


def _list_files(folder: Path) -> dict[str, CellFiles]:
    """List all records and traces of a folder, with their hashes."""
    listed = {}
    for path, record in _stored(folder):
        listed[record.cell_id] = _files(folder, path, record)
        if record.trace is not None and listed[record.cell_id].trace is None:
            raise UserError(f"{path}: its trace is missing")
    if not listed:
        raise UserError(f"{folder}: no records")
    return listed


def _foreign_files(folder: Path) -> Iterator[Path]:
    """Yield the paths in a folder that don't belong to a baseline: all of them if there is no baseline."""
    expected = _baseline_files(folder)
    for root, folders, files in os.walk(folder):
        here = Path(root)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in [*files, *links]):
            if path.is_symlink() or path not in expected:
                yield path.relative_to(folder)
        if here != folder and not folders and not files:
            yield here.relative_to(folder)


def _baseline_files(folder: Path) -> set[Path]:
    """The files that belong to the baseline in a folder, even if damaged; none if there is no baseline."""
    own = {folder / FILE, *folder.rglob(LOCK)}
    try:
        listed = parse(folder / FILE).cells.values()
    except UserError:
        return set()
    suites = {folder / PurePosixPath(files.record).parts[0] for files in listed}
    own |= {suite.with_name(suite.name + suffix) for suite in suites for suffix in (published.JSONL, published.PARQUET)}
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
