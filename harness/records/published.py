"""Published records: a line per record in `<suite>.jsonl`, long values and traces in `<suite>.parquet`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from kvbench.harness.core.files import atomic_write
from kvbench.harness.records.record import Problem, Record, file_stem, parse, slug, why_not_opened

if TYPE_CHECKING:
    import pyarrow as pa

JSONL, PARQUET = ".jsonl", ".parquet"
MARK = "@"  # stands in a line for a value that lies in the Parquet file
_DEPTHS = {"metrics": 1, "data": 0, "facts": 1}  # parts of a record with long values; a part of depth 0 moves as a whole
_MIN_NUMBERS = 16  # a longer list of numbers moves
_MAX_CHARACTERS = 60  # any other value moves if its JSON is longer
_MAX_DECIMALS = 9
_MAX_BYTES = 2**30  # largest size of a file, compressed and uncompressed
_BEGINNING = b'{"cell":'  # beginning of a record's line; a trace may be JSON lines, too
Key = tuple[str, str]  # (file name of a record without suffix, name of a value or suffix of a trace)


@dataclass
class Published:
    """A record and its published trace.

    Attributes:
        trace: content of the record's trace; None if the trace is not published.
    """

    record: Record
    trace: bytes | None = None


class Suite:
    """Contents of the two files of a suite.

    Attributes:
        path: path of the JSONL file.
        rows: row number of each value and trace in the Parquet file.
    """

    def __init__(self, path: Path, lines: Sequence[bytes], table: pa.Table, rows: Mapping[Key, int]) -> None:
        """Use the contents of the two files.

        Args:
            table: content of the Parquet file, with the columns of `_schema`, each in one chunk.
        """
        self.path, self.lines, self.rows = path, lines, rows
        self._text, self._content, self._decimals = table["text"], table["content"], table["decimals"].to_pylist()
        values = table["values"].combine_chunks()
        self._numbers = _array(values.values, np.float64)
        self._ends = _array(values.offsets, np.int32)

    def records(self) -> Iterator[tuple[Path, Record | Problem]]:
        """Yield each line's record or problem, with a path such as `zoo.jsonl:17`; records ordered as in a working folder."""
        contents = [(self.path.with_name(f"{self.path.name}:{n}"), line) for n, line in enumerate(self.lines, 1)]
        parsed = [(path, self._parsed(path, line)) for path, line in contents]
        first: dict[tuple[str, str], Path] = {}
        for i, (path, record) in enumerate(parsed):
            if isinstance(record, Record) and first.setdefault((record.cell_id, record.key), path) != path:
                parsed[i] = path, Problem(path, f"the same cell and key as {first[record.cell_id, record.key].name}")
        yield from ((path, x) for path, x in parsed if isinstance(x, Problem))
        yield from sorted(((path, x) for path, x in parsed if isinstance(x, Record)), key=lambda item: _place(item[1]))

    def having(self, text: str) -> Iterator[Record]:
        """Yield the records whose lines contain a text, such as a cell id."""
        for line in self.lines:
            if text.encode() in line and isinstance(record := self._parsed(self.path, line), Record):
                yield record

    def trace(self, record: Record) -> bytes | None:
        """Return the content of a record's trace; None if it has none or the trace is not published."""
        row = None if record.trace is None else self.rows.get((record.stem, record.trace.file.removeprefix(record.stem)))
        if row is None:
            return None
        content: bytes | None = self._content[row].as_py()
        return content if content is not None else str(self._text[row].as_py() or "").encode()

    def _parsed(self, path: Path, line: bytes) -> Record | Problem:
        try:
            value = from_json(line, allow_inf_nan=False)
        except ValueError as error:
            return Problem(path, f"not readable as JSON ({type(error).__name__})")
        try:
            stem = file_stem(value["cell"]["policy"], value["cell"]["capacity"], value["cell_id"], value["key"])
            whole = {k: self._joined(v, (stem, k)) if k in _DEPTHS else v for k, v in value.items()}
        except (AttributeError, KeyError, TypeError) as error:
            return Problem(path, str(error.args[0]) if isinstance(error, _MissingError) else "not a record")
        record = parse(whole, path)
        if isinstance(record, Record) and slug(record.cell.suite) != self.path.stem:
            return Problem(path, f"its suite {record.cell.suite} belongs into {slug(record.cell.suite)}{JSONL}")
        return record

    def _joined(self, value: Any, key: Key) -> Any:
        """Return the value with each mark replaced by the value in the Parquet file."""
        if isinstance(value, dict):
            return {k: self._joined(v, (key[0], f"{key[1]}.{k}")) for k, v in value.items()}
        if value != MARK:
            return value
        if key not in self.rows:
            raise _MissingError(f"its {key[1]} is missing in {self.path.with_suffix(PARQUET).name}")
        return self._value(self.rows[key])

    def _value(self, row: int) -> Any:
        numbers, decimals = self._numbers[self._ends[row] : self._ends[row + 1]], self._decimals[row]
        if not len(numbers):
            return from_json(self._text[row].as_py() or "null")
        return (numbers.astype(np.int64) if decimals is None else numbers / 10**decimals).tolist()


def _array(column: Any, dtype: Any) -> NDArray[Any]:
    """Return a column's numbers without `to_numpy`, which would import pandas and take most of a second."""
    return np.frombuffer(column.buffers()[1] or b"", dtype)[column.offset : column.offset + len(column)]


class _MissingError(KeyError):
    """A value of a record is not in the Parquet file."""


def is_published(path: Path) -> bool:
    """Return whether a `.jsonl` file holds records, not a trace."""
    if path.with_suffix(PARQUET).exists():
        return True
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def suite_file(folder: Path, record: Record) -> Path:
    """Return the JSONL file that has, or would have, a record in a published folder."""
    return folder / f"{slug(record.cell.suite)}{JSONL}"


def suite_of(folder: Path, record: Record) -> Suite | None:
    """Return the suite of a record in a published folder; None if its file is missing or can't be read."""
    path = suite_file(folder, record)
    suite = load(path) if path.exists() else None
    return suite if isinstance(suite, Suite) else None


def load(path: Path) -> Suite | Problem:
    """Read the two files of a suite. The last few suites are cached.

    Args:
        path: path of the JSONL file.
    """
    stamps = []
    for file in (path, path.with_suffix(PARQUET)):
        try:
            status = file.stat()
        except OSError:
            return Problem(path, f"{file.name} is missing")
        if reason := why_not_opened(status, _MAX_BYTES):
            return Problem(file, reason)
        stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return _load(path, tuple(stamps))


@lru_cache(maxsize=4)
def _load(path: Path, _: tuple[tuple[int, ...], ...]) -> Suite | Problem:
    """Read regular files. `_` changes whenever a file changes."""
    from pyarrow import parquet

    table_path = path.with_suffix(PARQUET)
    try:
        lines = path.read_bytes().splitlines()  # split bytes: str.splitlines also splits at characters that JSON allows
    except OSError as error:
        return Problem(path, f"can't be read ({error.strerror})")
    try:
        with parquet.ParquetFile(table_path) as file:
            groups = range(file.metadata.num_row_groups)
            if sum(file.metadata.row_group(i).total_byte_size for i in groups) > _MAX_BYTES:
                return Problem(table_path, f"larger than {_MAX_BYTES >> 20} MiB uncompressed")
            table = file.read().select(_schema().names).cast(_schema()).combine_chunks()
        keys = list(zip(table["record"].to_pylist(), table["name"].to_pylist(), strict=True))
    except Exception as error:  # pyarrow does not document which errors a damaged file raises
        return Problem(table_path, f"not readable as the Parquet file of {path.name} ({type(error).__name__})")
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < len(keys):
        return Problem(table_path, "has two rows of the same record and name")
    return Suite(path, lines, table, rows) if lines else Problem(path, "holds no records")


def write(path: Path, entries: Iterable[Published]) -> None:
    """Write the two files of a suite. The Parquet file is written first, so that no line lacks its values.

    Raises:
        OSError: the folder can't be written to.
    """
    lines, rows = [], []
    for entry in sorted(entries, key=lambda e: (e.record.cell_id, e.record.key)):
        record = entry.record
        own: list[dict[str, Any]] = []
        value = {k: _split(v, k, _DEPTHS[k], own) if k in _DEPTHS else v for k, v in record.as_json().items()}
        lines.append(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
        if entry.trace is not None and record.trace is not None:
            own.append({"name": record.trace.file.removeprefix(record.stem)} | _content(entry.trace))
        rows += [{"cell_id": record.cell_id, "record": record.stem} | row for row in own]
    _write_table(path.with_suffix(PARQUET), rows)
    with atomic_write(path) as file:
        file.writelines(lines)


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows in the order that compresses best: all values of a name together, in one page."""
    import pyarrow as pa
    from pyarrow import parquet

    rows.sort(key=lambda row: (row["name"], row["record"]))
    with atomic_write(path, "wb") as file:
        parquet.write_table(
            pa.Table.from_pylist(rows, _schema()),
            file,
            compression="zstd",
            compression_level=19,
            row_group_size=2**24,
            data_page_size=2**28,
            write_batch_size=2**20,
            write_statistics=False,
            store_schema=False,
            use_dictionary=["cell_id", "record", "name"],
            column_encoding={"values.list.element": "BYTE_STREAM_SPLIT"},
        )


def _schema() -> pa.Schema:
    """Return the columns of the Parquet file.

    Numbers are stored in `values`, divided by 10 to the power of `decimals` unless `decimals` is null. Any other value is stored
    as JSON in `text`. A trace is stored in `text`, or in `content` if it is binary.
    """
    import pyarrow as pa

    return pa.schema(
        {
            "cell_id": pa.string(),
            "record": pa.string(),
            "name": pa.string(),
            "values": pa.list_(pa.float64()),
            "decimals": pa.int8(),
            "text": pa.string(),
            "content": pa.binary(),
        }
    )


def _split(value: Any, name: str, depth: int, rows: list[dict[str, Any]]) -> Any:
    """Return the value with MARK for every long part, and add the long parts to the rows.

    Args:
        depth: levels of mappings that are always entered.
    """
    if isinstance(value, dict) and (depth or any(map(_has_numbers, value.values()))):
        return {k: _split(v, f"{name}.{k}", depth - 1 if depth else 0, rows) for k, v in value.items()}
    numbers = _integers(value) if _has_numbers(value) else None
    text = json.dumps(value, ensure_ascii=False, allow_nan=False) if numbers is None else ""
    if numbers is None and len(text) <= _MAX_CHARACTERS and f'"{MARK}"' not in text:
        return value
    rows.append({"name": name} | (numbers or {"text": text}))
    return MARK


def _has_numbers(value: Any) -> bool:
    """Return whether the value is a long list of numbers, or a mapping that has one."""
    if isinstance(value, dict):
        return any(map(_has_numbers, value.values()))
    return isinstance(value, list) and len(value) >= _MIN_NUMBERS and {type(x) for x in value} in ({int}, {float})


def _integers(value: Any) -> dict[str, Any] | None:
    """Return numbers as whole numbers and a number of decimals; None if that is inexact. Integers have no `decimals`."""
    if isinstance(value[0], int):
        return {"values": value} if max(map(abs, value)) < 2**53 else None
    numbers = np.array(value)
    if np.signbit(numbers[numbers == 0]).any():  # -0.0
        return None
    for decimals in range(_MAX_DECIMALS + 1):
        scaled = np.rint(numbers * 10**decimals)
        if np.abs(scaled).max() >= 2**53:
            return None
        if np.array_equal(scaled / 10**decimals, numbers):
            return {"values": scaled, "decimals": decimals}
    return None


def _content(trace: bytes) -> dict[str, Any]:
    try:
        return {"text": trace.decode()}
    except UnicodeDecodeError:
        return {"content": trace}


def _place(record: Record) -> tuple[str, str]:
    return slug(record.cell.model.id), record.stem
