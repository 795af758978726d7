"""A record, and reading one from its file. Imports no torch."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json

from kvbench.harness.core.visible import visible
from kvbench.harness.records.schema import mistake

RECORD_VERSION = 1
_LARGEST_FILE = 2**26  # bytes; a record of a million scores has a third of it
AHEAD = datetime.timedelta(days=1)  # of this machine's clock: more is no accident of time zones
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}  # from a version to the next
NUMERICS_VERSION = 1  # raised when numbers change for the same cell, weights and data (tests/test_golden.py)


def digest(value: object) -> str:
    """sha256 of a value's canonical JSON, in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Record:
    """What was asked, what came out, and everything needed to believe it.

    Attributes:
        cell: what was asked: suite, version, model, task, policy, parameters, capacity, positions, seed.
        cell_id: hash of `cell`.
        key: hash of what decided the numbers: cell id, token ids, weights, the policy's source, NUMERICS_VERSION.
        status: "ok", or "failed": then `error` says why and `metrics` may be empty.
        error: {"kind", "message", "where", "traceback"} of a failed cell (harness/core/failure.py).
        metrics: the task's figures.
        data: where the text came from: source, fingerprints, tokens, prefix.
        facts: device, versions, threads, block, method, seconds: what may differ without changing the numbers.
        finished: when, UTC, ISO 8601.
        trace: per-token figures beside the record: {"file", "sha256"}; None if the task keeps none.
        numerics: NUMERICS_VERSION of the code that measured.
        version: of this format.
    """

    cell: dict[str, Any]
    cell_id: str
    key: str
    status: Literal["ok", "failed"]
    error: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    finished: str = ""
    trace: dict[str, str] | None = None
    numerics: int = NUMERICS_VERSION
    version: int = RECORD_VERSION

    @property
    def stem(self) -> str:
        """File name without suffix: readable, and unique by cell id and key."""
        cell = self.cell
        words = [str(cell.get("policy", "")), *(f"c{c}" for c in [cell.get("capacity")] if c is not None)]
        return "-".join([*(slug(w) for w in words), self.cell_id[:8], self.key[:8]])


def slug(text: str) -> str:
    """A name that is safe as a file name everywhere."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", text).strip("._") or "_"


@dataclass(frozen=True)
class Problem:
    """A file among the records that is none, and why."""

    path: Path
    reason: str


def read(path: Path) -> Record | Problem:
    """One record, or what is wrong with the file. Whatever the file is, this raises nothing and waits for nothing."""
    try:
        unfit = _unfit(path.stat())
        if unfit is not None:
            return Problem(path, unfit)
        value = from_json(path.read_bytes(), allow_inf_nan=False)  # and a ValueError where it is nested too deeply
    except FileNotFoundError:
        return Problem(path, "not there")
    except (OSError, ValueError) as error:
        return Problem(path, f"not readable as JSON ({type(error).__name__})")
    if not isinstance(value, dict) or type(value.get("version")) is not int:
        return Problem(path, "not a record")
    if value["version"] > RECORD_VERSION:
        return Problem(
            path, f"of record version {value['version']}; this program reads up to {RECORD_VERSION}: a newer kv-bench is needed"
        )
    try:
        while value["version"] < RECORD_VERSION:
            value = MIGRATIONS[value["version"]](value) | {"version": value["version"] + 1}
    except Exception:  # no way from there, or a migration stumbles over what it finds
        return Problem(path, f"of record version {value['version']}, which nothing reads any more")
    wrong = mistake(value)
    if wrong is None and digest(value["cell"]) != value["cell_id"]:
        wrong = "the cell was edited: cell_id is the hash of another"
    return Record(**value) if wrong is None else Problem(path, f"not a whole record ({visible(wrong)})")


def _unfit(about: os.stat_result) -> str | None:
    """Why a file is not even opened: of a pipe there would be no end."""
    if not stat.S_ISREG(about.st_mode):
        return "no regular file"
    return f"larger than {_LARGEST_FILE >> 20} MiB" if about.st_size > _LARGEST_FILE else None


def from_the_future(records: Iterable[Record], now: datetime.datetime) -> list[Record]:
    """Those finished more than a day ahead of now: some clock was wrong, and they would hide every newer record."""
    return [r for r in records if (then := moment(r.finished)) is not None and then > now + AHEAD]


def moment(text: str) -> datetime.datetime | None:
    """A time as records have it; None if it is none."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)


def newest(records: list[Record]) -> list[Record]:
    """The newest record of every cell id, in a stable order."""
    first = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    best: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: (moment(r.finished) or first, r.key)):
        best[record.cell_id] = record
    return sorted(best.values(), key=lambda r: (str(r.cell["suite"]), str(r.cell["model"]["id"]), r.stem))
