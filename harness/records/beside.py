"""The files beside a record: its trace and its keep map. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.harness.core.packed import digest, stored
from kvbench.harness.records.facts import KeepMap, Trace
from kvbench.harness.records.record import Record


def files_beside(record: Record) -> Sequence[Trace | KeepMap]:
    """The trace and the keep map, if there are."""
    return [part for part in (record.trace, record.facts.keep_map) if part is not None]


def file_problem(path: Path, sha256: str) -> str:
    """What is wrong with a file that a record names, plain or compressed; empty if it is what was measured, and no link."""
    path = stored(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "is not a regular file"
    if not path.exists():
        return "is missing"
    try:
        same = digest(path) == sha256
    except (OSError, ValueError) as error:
        return f"can't be read ({error})"
    return "" if same else "has changed since it was measured: its sha256 differs"
