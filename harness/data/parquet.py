"""Rows with a text, from a parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError


def rows(file: Path, others: Sequence[str] = (), at_once: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in order: `text` (empty if null), and the columns in `others` that have a value.

    Args:
        file: parquet file with a column `text` of strings.
        others: names of columns that the file may lack.
        at_once: number of rows that are read into memory together; a book is a row.

    Raises:
        UserError: the file is no readable parquet file, has no column `text` of strings, or is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    names = table.schema_arrow.names
    if "text" not in names:
        raise UserError(f"{file}: no column 'text', only {', '.join(names)}")
    kind = table.schema_arrow.field("text").type
    if not _is_text(kind):
        raise UserError(f"{file}: column 'text' holds {kind}, expected string")
    columns = ["text", *(name for name in others if name in names)]
    try:
        for batch in table.iter_batches(batch_size=at_once, columns=columns):
            for row in batch.to_pylist():
                yield {"text": row["text"] or ""} | {name: row[name] for name in columns[1:] if row[name] is not None}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: damaged: a row can't be read ({str(error).splitlines()[0]})") from error


def _is_text(kind: Any) -> bool:
    """Whether an Arrow type holds strings, plain or dictionary-encoded."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
