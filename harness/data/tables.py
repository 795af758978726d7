"""Rows of data sets, from parquet and JSON-lines files in a local directory or from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import read_utf8
from kvbench.harness.data.data_files import bears, files_below, listed, say_left_out
from kvbench.harness.models.hub import quiet

_LONGEST_ROW = 2**28  # bytes


def files(directory: Path, *choices: tuple[Sequence[str], str]) -> list[Path]:
    """Return the parquet and JSON-lines files of a directory.

    Args:
        directory: directory that is searched with its subfolders, or a single file.
        choices: names of subsets or splits, and the wanted name. A file bears a name that is a whole word of its own name, or a
            folder inside the directory. If any file bears one of the names, only files that bear the wanted name are returned,
            and files without any of the names are reported on stderr.

    Raises:
        UserError: the directory has no such file.
    """
    chosen = files_below(directory, (".parquet", ".jsonl"))
    for names, wanted in choices:
        named = [f for f in chosen if any(_bears(f, name, directory) for name in names)]
        if named and (unnamed := tuple(f for f in chosen if f not in named)):
            say_left_out(directory, unnamed, f"{listed(named)} and not these are named after one of {', '.join(names)}")
        chosen = [f for f in named if _bears(f, wanted, directory)] if named else chosen
    if not chosen:
        raise UserError(f"{directory}: no .parquet or .jsonl file of {' '.join(wanted for _, wanted in choices)}")
    return chosen


def _bears(file: Path, name: str, directory: Path) -> bool:
    """Whether a file, or a folder between it and the directory, is named after a subset or split."""
    folders = file.relative_to(directory).parts[:-1]
    return bears(file, name) or name.lower() in (folder.lower() for folder in folders)


def rows(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a file.

    Raises:
        UserError: the file can't be read, or lacks one of these columns.
    """
    import pyarrow
    import pyarrow.json
    import pyarrow.parquet

    try:
        if file.suffix.lower() == ".parquet":
            table = pyarrow.parquet.read_table(file)
        else:
            read_utf8(file)  # pyarrow does not say where a wrong byte is
            table = pyarrow.json.read_json(file, pyarrow.json.ReadOptions(block_size=_LONGEST_ROW))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not readable ({str(error).splitlines()[0]})") from error
    missing = [c for c in columns if c not in table.column_names]
    if missing:
        raise UserError(f"{file}: no column '{missing[0]}', only {', '.join(table.column_names)}")
    try:
        result: list[dict[str, Any]] = table.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: damaged: a row can't be read ({error})") from error
    return result


def hub_rows(name: str, hub_id: str, *which: str, **how: Any) -> Iterable[dict[str, Any]]:
    """Return the rows of a data set on the hub. `datasets` uses its local cache first.

    Args:
        name: name of the data set, for messages.
        hub_id: id of the data set on the hub.
        which: name of the subset.
        how: further arguments of `load_dataset`.

    Raises:
        UserError: the data set can't be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"{name}: loading from the hub needs the package 'datasets'; install it or give --data DIR") from error
    quiet()
    try:
        rows: Iterable[dict[str, Any]] = load_dataset(hub_id, *which, **how)
    except Exception as error:  # datasets raises many kinds when the hub is out of reach
        raise UserError(
            f"{name}: not in the local cache, and the hub is out of reach ({type(error).__name__}); give --data DIR, "
            f"a directory of {hub_id}'s parquet files"
        ) from error
    return rows


def text_rows(file: Path, others: Sequence[str] = (), at_once: int = 1) -> Iterator[dict[str, Any]]:
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
