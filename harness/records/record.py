"""A record, and reading one from its file. Imports no torch."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from kvbench.harness.core import plugins
from kvbench.harness.core.visible import visible
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.facts import Data, Facts, Failure, Trace
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.types import BadRecordError, Document, Sha256, Whole

Status = Literal["ok", "failed"]
D = TypeVar("D", bound=Document)
M = TypeVar("M", bound=Metrics)

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
    """What was asked, what came out, and everything needed to believe it. One JSON file a cell.

    Attributes:
        cell: what was asked.
        cell_id: hash of `cell`.
        key: hash of what decided the numbers: cell id, token ids, weights, the policy's source, NUMERICS_VERSION.
        status: "ok", or "failed": then `error` says why and `metrics` may be empty.
        error: what a failed cell failed with (harness/core/failure.py).
        metrics: the task's figures, of the task's own model where it is installed and the cell went well.
        data: what was read.
        facts: what may differ without changing the numbers.
        finished: when, UTC, ISO 8601.
        trace: the file of per-token figures beside the record; None if the task keeps none.
        numerics: NUMERICS_VERSION of the code that measured.
        version: of this format.
    """

    cell: CellSpec
    cell_id: str
    key: str
    status: Status
    error: Failure | None = None
    metrics: Metrics = field(default_factory=Metrics)
    data: Data = field(default_factory=Data)
    facts: Facts = field(default_factory=Facts)
    finished: str = ""
    trace: Trace | None = None
    numerics: int = NUMERICS_VERSION
    version: int = RECORD_VERSION

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Check a record's JSON, part by part, each once.

        Raises:
            BadRecordError: the first mistake in it.
        """
        try:
            whole = _Envelope.model_validate(value)
        except ValidationError as error:
            raise BadRecordError.from_validation(error) from None
        cell = _part(CellSpec, "cell", value)
        task = plugins.known_task(cell.task.name)
        ok = task is not None and whole.status == "ok"
        metrics: Metrics = _part(task.metrics if task and ok else Metrics, "metrics", value)
        if task and ok:
            task.check_figures(cell.task, metrics)
        return cls(
            cell, whole.cell_id, whole.key, whole.status,
            None if whole.error is None else _part(Failure, "error", value),
            metrics, _part(task.data_facts if task else Data, "data", value), _part(Facts, "facts", value), whole.finished,
            None if whole.trace is None else _part(Trace, "trace", value), whole.numerics, whole.version,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """What its file holds."""
        return {
            name: part.as_json() if isinstance(part, Document) else part
            for name, part in ((f.name, getattr(self, f.name)) for f in fields(self))
        }

    def measured(self, kind: type[M]) -> M | None:
        """Its figures, if the cell went well and they are of this kind."""
        return self.metrics if self.status == "ok" and isinstance(self.metrics, kind) else None

    def measures(self, kind: type[Metrics]) -> bool:
        """Whether its task's figures are of this kind, those of a failed cell included, which has none."""
        task = plugins.known_task(self.cell.task.name)
        return isinstance(self.metrics, kind) or (task is not None and issubclass(task.metrics, kind))

    @property
    def stem(self) -> str:
        """File name without suffix: readable, and unique by cell id and key."""
        cell = self.cell
        words = [cell.policy, *(f"c{c}" for c in [cell.capacity] if c is not None)]
        return "-".join([*(slug(w) for w in words), self.cell_id[:8], self.key[:8]])


def _time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


class _Envelope(BaseModel):
    """A record's file, its parts not looked into."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cell: dict[str, Any]
    cell_id: Sha256
    key: Annotated[str, Field(pattern="^[0-9A-Za-z]{1,128}$")]
    status: Status
    error: dict[str, Any] | None
    metrics: dict[str, Any]
    data: dict[str, Any]
    facts: dict[str, Any]
    finished: Annotated[str, Field(max_length=40), AfterValidator(_time)]
    trace: dict[str, Any] | None
    numerics: Whole
    version: Whole


def _part(kind: type[D], name: str, value: Mapping[str, Any]) -> D:
    """One part of a record's JSON, checked."""
    try:
        return kind.from_json(value[name])
    except BadRecordError as error:
        raise error.inside(name) from None


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
    try:
        record = Record.from_json(value)
    except Exception as error:  # a task that is not ours may stumble over what it finds
        what = str(error) if isinstance(error, BadRecordError) else repr(error)
        return Problem(path, f"not a whole record ({visible(what)})")
    if digest(value["cell"]) != record.cell_id:
        return Problem(path, "not a whole record (the cell was edited: cell_id is the hash of another)")
    return record


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
    return sorted(best.values(), key=lambda r: (r.cell.suite, r.cell.model.id, r.stem))
