"""Baselines: folders of records with which later runs are compared. Writing a baseline can replace only another baseline."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbench.harness.core.errors import UserError
from kvbench.harness.records import Problem, Record, RecordStore, publish, published
from kvbench.harness.records.beside import TraceFile, open_trace
from kvbench.harness.report.gate_times import Band

FILE = "baseline.yaml"
_HEAD = "# Written by `bench baseline update`; don't edit.\n"
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class MeasuredWith(BaseModel):
    """Options of `bench run` that changed the suite; none is an absolute path.

    Attributes:
        model: hub id, or name of a built-in model.
        local_model: folder name of a local model; `bench check --model` gives its path.
        policies: policies that replace the suite's.
        settings: changed values of the suite, as "key=value".
        device: device of the run.
    """

    model_config = _STRICT

    model: str | None = None
    local_model: str | None = None
    policies: list[str] = []
    settings: list[str] = []
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    threads: int | None = Field(None, ge=1)


class Baseline(BaseModel):
    """Description of a baseline, stored beside its records.

    Attributes:
        suite: name of the measured suite, or its file relative to the baseline's folder.
        options: overrides of the suite.
        who: author of the baseline.
        when: ISO 8601, UTC.
        why: reason for the baseline, in a sentence.
        records: hash of each record, by its file in a working folder. A record names the hash of its trace.
        bands: noise bands of latency, by cell id.
    """

    model_config = _STRICT

    suite: str
    options: MeasuredWith = MeasuredWith()
    who: str
    when: str
    why: str
    records: dict[str, Sha256] = Field({}, min_length=1)
    bands: dict[str, Band] = {}


def parse(path: Path) -> Baseline:
    """Read `baseline.yaml`.

    Raises:
        UserError: the file is missing or not a baseline.
    """
    try:
        return Baseline.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError:
        raise UserError(
            f"{path.parent}: no baseline ({FILE} is missing); 'bench baseline update' makes one in a new or empty folder"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part)[:40] for part in first["loc"])
        raise UserError(f"{path}: not a baseline ({f'{field}: ' if field else ''}{first['msg'].lower()})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a baseline ({type(error).__name__})") from None


def load(folder: Path) -> tuple[Baseline, list[Record]]:
    """Read a baseline and its records, and check the hash of every record and trace.

    Raises:
        UserError: the folder is not a baseline, or a record or trace is missing, changed or not listed.
    """
    baseline, records = parse(folder / FILE), _records(folder)
    hashes = {name: _sha256(record) for name, record in records.items()}
    for name in sorted(hashes.keys() | baseline.records.keys()):
        if hashes.get(name) != baseline.records.get(name):
            state = "is missing" if name not in hashes else "has changed" if name in baseline.records else "is not listed"
            raise UserError(f"{folder / name}: {state} (differs from {FILE}): restore it, or make a new baseline")
    return baseline, [records[name] for name in baseline.records]


def store(folder: Path, baseline: Baseline, source: Path) -> None:
    """Write a baseline to a folder. An old baseline there is replaced, but survives an error.

    Args:
        baseline: description, in which `records` is filled in here.
        source: working folder of the baseline's records and traces, on the same file system as `folder`.

    Raises:
        UserError: the folder holds something other than a baseline, or a trace is missing.
    """
    target, written = replaceable(folder), source.with_name(f"{source.name}.published")
    hashes = {name: _sha256(record) for name, record in _records(source).items()}
    values = baseline.model_copy(update={"records": hashes}).model_dump(exclude_defaults=True)
    publish(source, written, arrays=True)
    (written / FILE).write_text(_HEAD + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    old = source.with_name(f"{source.name}.old")
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(written, target)
    except BaseException:
        if old.exists():
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def replaceable(folder: Path) -> Path:
    """Return the resolved folder if a baseline may be written there: if it is missing, empty, or holds only a baseline.

    Raises:
        UserError: the folder holds other files.
    """
    target = folder.resolve()
    if Path.cwd().is_relative_to(target):
        raise UserError(f"{folder}: contains the current directory, and would be replaced: name another folder")
    if target.exists() and not target.is_dir():
        raise UserError(f"{folder}: is a file; a baseline needs a folder: name a new or empty one")
    paths = sorted(target.iterdir()) if target.exists() else []
    for path in paths:
        own = path.name == FILE or path.suffix in (published.JSONL, published.PARQUET)
        if not own or path.is_symlink() or not path.is_file():
            raise UserError(f"{folder}: holds {path.name}, not part of a baseline: name a new or empty folder")
    if paths:
        parse(target / FILE)
    return target


def _records(folder: Path) -> dict[str, Record]:
    """Return the records in a folder by their file in a working folder.

    Raises:
        UserError: a file can't be read as a record, or a trace is missing or changed.
    """
    records: dict[str, Record] = {}
    for path, record in RecordStore(folder).files():
        if isinstance(record, Problem):
            raise UserError(f"{path}: the baseline can't be read ({record.reason}): restore it, or make a new baseline")
        trace = open_trace(record, path.parent)
        if record.trace is not None and (not isinstance(trace, TraceFile) or trace.problem(record.trace.sha256)):
            raise UserError(f"{path}: the trace of {record.stem} is missing or changed: restore it, or make a new baseline")
        records[RecordStore(folder).path(record).relative_to(folder).as_posix()] = record
    return records


def _sha256(record: Record) -> str:
    return hashlib.sha256(record.as_text().encode()).hexdigest()
