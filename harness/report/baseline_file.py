"""`baseline.yaml`: how a baseline was measured, the hashes of its files, and the noise bands of its latency."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvbench.harness.core.errors import UserError
from kvbench.harness.report.bands import Band

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
