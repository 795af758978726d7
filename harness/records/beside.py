"""Files stored beside a record: its trace and its keep map. Imports no torch."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Self

from kvbench.harness.records import published
from kvbench.harness.records.record import Problem, Record, read


class TraceFile(io.BytesIO):
    """Content of a trace, as a file that `np.load` and `json_lines` accept.

    Attributes:
        path: path of the trace, for messages.
        folder: folder of the record's file or, for a published record, of the suite's files.
    """

    def __init__(self, content: bytes, path: Path, folder: Path) -> None:
        super().__init__(content)
        self.path, self.folder = path, folder

    def rewound(self) -> Self:
        """Return this file, rewound to its beginning."""
        self.seek(0)
        return self

    def problem(self, sha256: str) -> str:
        """Return the problem of the content; empty if the content is unchanged since the measurement."""
        return "" if hashlib.sha256(self.getbuffer()).hexdigest() == sha256 else _CHANGED


_CHANGED = "has changed since it was measured: its sha256 differs"


def open_trace(record: Record, folder: Path) -> TraceFile | Problem | None:
    """Read the trace of a record; None if the record has no trace.

    Args:
        folder: folder of the record's file.
    """
    if record.trace is None:
        return None
    path = folder / Path(record.trace.file).name
    if os.path.lexists(path):
        if path.is_symlink() or not path.is_file():
            return Problem(path, "is not a regular file")
        try:
            return TraceFile(path.read_bytes(), path, folder)
        except OSError as error:
            return Problem(path, f"can't be read ({error})")
    suite = published.suite_of(folder, record)
    content = None if suite is None else suite.trace(record)
    if suite is None or content is None:
        return None
    return TraceFile(content, suite.path.with_suffix(published.PARQUET) / path.name, folder)


def read_beside(record: Record, name: str, folder: Path) -> Record | Problem:
    """Read another record of the same suite and model.

    Args:
        name: file name of the other record.
        folder: folder of the file of `record`.
    """
    other = read(folder / name)
    if isinstance(other, Problem) and (suite := published.suite_of(folder, record)) is not None:
        stem = name.removesuffix(".json")
        return next((r for r in suite.having(stem.rpartition("-")[0][-8:]) if r.stem == stem), other)
    return other


def file_problem(path: Path, sha256: str) -> str:
    """Return the problem of a file that a record names; empty for a regular file with unchanged content."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "is not a regular file"
    if not path.exists():
        return "is missing"
    try:
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError as error:
        return f"can't be read ({error})"
    return "" if same else _CHANGED
