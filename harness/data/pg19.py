"""PG-19: full-length books, from a local directory, the local Hugging Face cache or the hub.

Source: Rae et al. 2019, arXiv:1911.05507. The original repository needs a loading script, which `datasets` no longer runs, so
this uses a parquet edition of the same books at a pinned revision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import read_utf8
from kvbench.harness.data.data_files import files_below, listed, of_split, say_left_out
from kvbench.harness.data.stream import Text
from kvbench.harness.data.tables import text_rows
from kvbench.harness.models.hub import quiet

HUB_ID = "emozilla/pg19"
HUB_REVISION = "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8"


def book(number: int, split: str, directory: Path | None) -> tuple[str, Iterator[Text]]:
    """Return a description of the source, and the one book with this number in Project Gutenberg's catalogue.

    Raises:
        UserError: the split has no such book.
    """
    source, all_books = books(split, directory)
    match = next((b for b in all_books if b.number == number), None)
    if match is None:
        raise UserError(f"{source}: no book {number} (the number at the end of its 'url')")
    return source, iter([match])


def books(split: str, directory: Path | None) -> tuple[str, Iterator[Text]]:
    """Return a description of the source, and its books in order.

    The directory has parquet files with a `text` column or .txt files in UTF-8, or is one such file. If some file names contain
    the name of a split ("train", "validation", "test") as a whole word, only the files of `split` are read. Otherwise all files
    are read, sorted by name. Files that are left out are named on stderr, except files of other splits.

    Raises:
        UserError: the directory has no text, or the directory or the hub can't be reached.
    """
    if directory is None:
        return f"{HUB_ID}@{HUB_REVISION[:8]} {split}", _from_hub(split)
    files = _files(directory, split)
    return f"local {listed(files)}", _from_files(files)


def _files(directory: Path, split: str) -> list[Path]:
    """Return the files of a split."""
    texts = [f for f in files_below(directory, (".parquet", ".txt")) if f == directory or f.name.lower() != "readme.txt"]
    if not texts:
        raise UserError(f"{directory}: no text (.parquet with a 'text' column, or .txt)")
    suffix = ".parquet" if any(f.suffix.lower() == ".parquet" for f in texts) else ".txt"
    files = [f for f in texts if f.suffix.lower() == suffix]
    chosen = of_split(directory, files, split)
    if others := tuple(f for f in texts if f not in {*files}):
        say_left_out(directory, others, f"there are {suffix} files")
    return chosen


def _from_files(files: list[Path]) -> Iterator[Text]:
    """Yield the books of files, read one at a time so that a split need not fit in memory."""
    for file in files:
        if file.suffix.lower() == ".txt":
            yield Text(file.stem, read_utf8(file))
        else:
            yield from _from_parquet(file)


def _from_parquet(file: Path) -> Iterator[Text]:
    for number, row in enumerate(text_rows(file, ("short_book_title", "title", "url")), 1):
        title = next((str(row[c]) for c in ("short_book_title", "title") if c in row), f"{file.stem} {number}")
        yield Text(title, row["text"], _number(row.get("url")))


def _number(url: object) -> int | None:
    """Return a book's number in Project Gutenberg's catalogue: the last part of its URL."""
    match = re.search(r"/(\d+)$", str(url))
    return int(match[1]) if match else None


def _from_hub(split: str) -> Iterator[Text]:
    """Yield the books of the pinned edition. `datasets` uses its local cache first."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError("pg19: loading from the hub needs the package 'datasets'; install it or give --data DIR") from error
    quiet()
    try:
        table = load_dataset(HUB_ID, revision=HUB_REVISION, data_files={split: f"data/{split}-*.parquet"}, split=split)
    except Exception as error:  # datasets raises many kinds when the hub is out of reach
        raise UserError(
            f"pg19: not in the local cache, and the hub is out of reach ({type(error).__name__}); "
            f"give --data DIR or BENCH_DATA, a directory of .parquet or .txt books"
        ) from error
    for row in table:
        yield Text(row["short_book_title"], row["text"], _number(row["url"]))
