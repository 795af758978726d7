"""Records, and reading a record from its file. Imports no torch."""

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

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import from_json

from kvbench.harness.core import plugins
from kvbench.harness.core.shown import visible
from kvbench.harness.records.cell import CellSpec
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.run_facts import DataFacts, Facts, Failure, RecordedTrace
from kvbench.harness.records.types import BadRecordError, Document, Sha256, Whole, validate

Status = Literal["ok", "failed"]
D = TypeVar("D", bound=Document)
M = TypeVar("M", bound=Metrics)

RECORD_VERSION = 1
_MAX_FILE_BYTES = 2**26  # three times a record of a million scores
MAX_CLOCK_SKEW = datetime.timedelta(days=1)  # more than time zones explain
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}  # by version: to the next version
NUMERICS_VERSION = 1  # raised when numbers change for the same cell, weights and data (tests/test_golden.py)


def digest(value: object) -> str:
    """Return the sha256 of a value's canonical JSON, in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Record:
    """Record of a measured cell: its specification, the figures, and what is needed to check them.

    Attributes:
        cell_id: hash of `cell`.
        key: hash of everything that determines the figures: cell id, token ids, weights, the policy's source, the task's version,
            NUMERICS_VERSION.
        status: "ok", or "failed": then `error` says why and `metrics` may be empty.
        metrics: the task's figures, an instance of the task's own class if the cell succeeded and the task is installed.
        facts: properties of the run that may differ without changing the figures.
        finished: time in UTC, ISO 8601.
        trace: the file beside the record with figures per token, question or step; None if the task keeps none.
        numerics: NUMERICS_VERSION of the code that measured the cell.
    """

    cell: CellSpec
    cell_id: str
    key: str
    status: Status
    error: Failure | None = None
    metrics: Metrics = field(default_factory=Metrics)
    data: DataFacts = field(default_factory=DataFacts)
    facts: Facts = field(default_factory=Facts)
    finished: str = ""
    trace: RecordedTrace | None = None
    numerics: int = NUMERICS_VERSION
    version: int = RECORD_VERSION

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Validate a record's JSON.

        Raises:
            BadRecordError: the JSON is invalid. The message names the first mistake.
        """
        envelope, cell = validate(_Envelope, value), _part(CellSpec, "cell", value)
        task = plugins.known_task(cell.task.name)
        is_typed = task is not None and envelope.status == "ok"
        documents: dict[str, type[Document]] = {
            "error": Failure,
            "metrics": task.metrics if task and is_typed else Metrics,
            "data": task.data_facts if task else DataFacts,
            "facts": Facts,
            "trace": RecordedTrace,
        }
        parts = {name: _part(kind, name, value) for name, kind in documents.items() if value[name] is not None}
        record = cls(**dict(envelope) | {"cell": cell} | parts)
        if is_typed:
            record.metrics.check(cell.task)
        return record

    def as_json(self) -> dict[str, Any]:
        """Return the content of the record's file."""
        return {
            name: part.as_json() if isinstance(part, Document) else part
            for name, part in ((f.name, getattr(self, f.name)) for f in fields(self))
        }

    def measured(self, metrics: type[M]) -> M | None:
        """Return the figures if the cell succeeded and they are of this class, else None."""
        return self.metrics if self.status == "ok" and isinstance(self.metrics, metrics) else None

    def measures(self, metrics: type[Metrics]) -> bool:
        """Whether the record's task yields figures of this class, even if the cell failed."""
        task = plugins.known_task(self.cell.task.name)
        return isinstance(self.metrics, metrics) or (task is not None and issubclass(task.metrics, metrics))

    @property
    def failure(self) -> str:
        """Kind of a failed cell's error; empty if the cell succeeded."""
        return "" if self.status == "ok" else (self.error and self.error.kind) or "failed"

    @property
    def tokens_read(self) -> int:
        """Number of tokens of the text that were read: all, unless reading stopped early."""
        return self.metrics.tokens_read or self.data.tokens

    @property
    def stem(self) -> str:
        """File name without suffix: readable, and unique for cell id and key."""
        return file_stem(self.cell.policy, self.cell.capacity, self.cell_id, self.key)

    def as_text(self) -> str:
        """Return the text of the record's file in a working folder."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _iso_time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


class _Envelope(BaseModel):
    """The outer level of a record's file; its parts are validated later."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cell: dict[str, Any]
    cell_id: Sha256
    key: Annotated[str, Field(pattern="^[0-9A-Za-z]{1,128}$")]
    status: Status
    error: dict[str, Any] | None
    metrics: dict[str, Any]
    data: dict[str, Any]
    facts: dict[str, Any]
    finished: Annotated[str, Field(max_length=40), AfterValidator(_iso_time)]
    trace: dict[str, Any] | None
    numerics: Whole
    version: Whole


def _part(document: type[D], name: str, value: Mapping[str, Any]) -> D:
    try:
        return document.from_json(value[name])
    except BadRecordError as error:
        raise error.inside(name) from None


def slug(text: str) -> str:
    """Return the text with underscores for all characters that some file system forbids in a name."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", text).strip("._") or "_"


@dataclass(frozen=True)
class Problem:
    """A file in the folder of records that can't be read as a record, and the reason."""

    path: Path
    reason: str


def file_stem(policy: str, capacity: int | None, cell_id: str, key: str) -> str:
    """Return the file name of a record without suffix."""
    words = [policy, *(f"c{c}" for c in [capacity] if c is not None)]
    return "-".join([*(slug(w) for w in words), cell_id[:8], key[:8]])


def read(path: Path) -> Record | Problem:
    """Read a record from its file. The function never raises and never blocks, whatever the file is."""
    try:
        reason = why_not_opened(path.stat(), _MAX_FILE_BYTES)
        if reason is not None:
            return Problem(path, reason)
        value = from_json(path.read_bytes(), allow_inf_nan=False)  # nesting that is too deep is a ValueError
    except FileNotFoundError:
        return Problem(path, "does not exist")
    except (OSError, ValueError) as error:
        return Problem(path, f"not readable as JSON ({type(error).__name__})")
    return parse(value, path)


def parse(value: Any, path: Path) -> Record | Problem:
    """Return the record of a JSON value, or the problem of an invalid value.

    Args:
        path: path of the record's file, for messages.
    """
    if not isinstance(value, dict) or type(value.get("version")) is not int:
        return Problem(path, "not a record")
    if value["version"] > RECORD_VERSION:
        return Problem(
            path,
            f"has record version {value['version']}, but this kv-bench reads up to {RECORD_VERSION}: install a newer one",
        )
    try:
        while value["version"] < RECORD_VERSION:
            value = MIGRATIONS[value["version"]](value) | {"version": value["version"] + 1}
    except Exception:  # there is no migration, or it fails on this file
        return Problem(path, f"can't be migrated from record version {value['version']}")
    try:
        record = Record.from_json(value)
    except Exception as error:  # a plugin's task may raise anything
        message = str(error) if isinstance(error, BadRecordError) else repr(error)
        return Problem(path, f"not a valid record ({visible(message)})")
    if digest(value["cell"]) != record.cell_id:
        return Problem(path, "not a valid record (the cell was edited: its hash is not cell_id)")
    return record


def why_not_opened(status: os.stat_result, most_bytes: int) -> str | None:
    """Return the reason that a file is not opened, for example that reading a pipe would block; None if it can be opened."""
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    return f"larger than {most_bytes >> 20} MiB" if status.st_size > most_bytes else None


def from_the_future(records: Iterable[Record], now: datetime.datetime) -> list[Record]:
    """Return the records that finished more than a day after `now`. A clock was wrong, and such records hide newer records."""
    return [r for r in records if (then := parse_time(r.finished)) is not None and then > now + MAX_CLOCK_SKEW]


def parse_time(text: str) -> datetime.datetime | None:
    """Return the time of a text, in UTC if the text names no zone; None if the text is not a time."""
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


def newest(records: list[Record]) -> list[Record]:
    """Return the newest record of each cell, in a stable order."""
    earliest = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    by_cell: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: (parse_time(r.finished) or earliest, r.key)):
        by_cell[record.cell_id] = record
    return sorted(by_cell.values(), key=lambda r: (r.cell.suite, r.cell.model.id, r.stem))
