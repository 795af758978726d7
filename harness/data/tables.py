"""Rows of data sets, from parquet and JSON-lines files in a local directory or from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.utf8 import read_utf8
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
