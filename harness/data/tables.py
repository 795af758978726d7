"""Rows of data sets: of parquet and JSON-lines files in a local directory, or from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.models.hub import quiet

_LONGEST_ROW = 2**28  # bytes


def files(directory: Path, *choices: tuple[Sequence[str], str]) -> list[Path]:
    """The parquet and JSON-lines files of a directory, or the one file that it is.

    Args:
        directory: to look in, and below.
        choices: names of subsets or splits, and the wanted one. Where files or folders bear such names, only those that bear the
            wanted one count.

    Raises:
        UserError: there are none.
    """
    if not directory.exists():
        raise UserError(f"{directory}: no such directory (--data or BENCH_DATA)")
    paths = [directory] if directory.is_file() else sorted(directory.rglob("*"))
    found = [f for f in paths if f.suffix in (".parquet", ".jsonl")]
    for names, wanted in choices:
        named = [f for f in found if any(n in str(f.relative_to(directory.parent)) for n in names)]
        found = [f for f in named if wanted in str(f.relative_to(directory.parent))] if named else found
    if not found:
        raise UserError(f"{directory}: no .parquet or .jsonl file of {' '.join(wanted for _, wanted in choices)}")
    return found


def rows(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file.

    Raises:
        UserError: it can't be read, or lacks one of these columns.
    """
    import pyarrow
    import pyarrow.json
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            table = pyarrow.parquet.read_table(file)
        else:
            table = pyarrow.json.read_json(file, pyarrow.json.ReadOptions(block_size=_LONGEST_ROW))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not readable ({str(error).splitlines()[0]})") from error
    missing = [c for c in columns if c not in table.column_names]
    if missing:
        raise UserError(f"{file}: no column '{missing[0]}', only {', '.join(table.column_names)}")
    try:
        found: list[dict[str, Any]] = table.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: damaged: a row can't be read ({error})") from error
    return found


def hub_rows(name: str, hub_id: str, *which: str, **how: Any) -> Iterable[dict[str, Any]]:
    """The rows of a data set on the hub. `datasets` uses its local cache first.

    Args:
        name: of the data set, for messages.
        hub_id: its id.
        which: its subset.
        how: further arguments of `load_dataset`.

    Raises:
        UserError: it can't be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"{name}: loading from the hub needs the package 'datasets'; install it or give --data DIR") from error
    quiet()
    try:
        found: Iterable[dict[str, Any]] = load_dataset(hub_id, *which, **how)
    except Exception as error:  # datasets raises many kinds when the hub is out of reach
        raise UserError(
            f"{name}: not in the local cache, and the hub is out of reach ({type(error).__name__}); give --data DIR, "
            f"a directory of {hub_id}'s parquet files"
        ) from error
    return found
