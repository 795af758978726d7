"""Who measured a record: we did, or it was submitted, and then CI may have measured its cell again. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.records.record import Record, digest
from kvbench.harness.records.types import FileName, Sha256

Standing = Literal["ours", "as submitted", "repeated by CI"]
SUBMITTED_FILE = "submitted.jsonl"  # beside the records of a suite and model


class Submitted(BaseModel):
    """A line of `submitted.jsonl`: a record that was submitted.

    Attributes:
        record: name of its file, without the suffix.
        sha256: of the record, so that an edit voids `repeated`.
        repeated: when, on which device and at which commit CI measured the cell again; None if it did not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    record: FileName
    sha256: Sha256
    repeated: str | None = None


def fingerprint(record: Record) -> str:
    """sha256 of a record's content, whatever the line endings of its file."""
    return digest(record.as_json())


def standing(record: Record, submitted: Mapping[str, Submitted]) -> Standing:
    """Who measured a record. submitted: of the same folder, from `read_submitted`."""
    entry = submitted.get(record.stem)
    if entry is None:
        return "ours"
    return "repeated by CI" if entry.repeated and entry.sha256 == fingerprint(record) else "as submitted"


def read_submitted(folder: Path) -> dict[str, Submitted]:
    """The submitted records in a folder and its subfolders, by the name of the record's file without the suffix.

    Raises:
        UserError: a line is malformed.
    """
    entries = {}
    for path in sorted(folder.rglob(SUBMITTED_FILE)):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                entry = Submitted.model_validate_json(line)
            except ValidationError as error:
                raise UserError(f"{path}:{number}: not a submitted record ({error.errors()[0]['msg']})") from None
            entries[entry.record] = entry
    return entries


def add_submitted(folder: Path, entries: Iterable[Submitted]) -> None:
    """Add lines to the `submitted.jsonl` of a suite and model; a line of the same record is replaced.

    Raises:
        UserError: a line that is there is malformed.
        OSError: the folder can't be written to.
    """
    merged = read_submitted(folder) | {entry.record: entry for entry in entries}
    with atomic_write(folder / SUBMITTED_FILE) as file:
        file.writelines(f"{merged[name].model_dump_json()}\n" for name in sorted(merged))
