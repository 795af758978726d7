"""Texts for tasks that read running text: books, Wikipedia articles, generated prose or Bigram-Backcopy's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from kvbench.harness.core.errors import UserError
from kvbench.harness.data import backcopy, pg19, wikitext
from kvbench.harness.data.prose import Prose
from kvbench.harness.data.stream import Text

Source = Literal["pg19", "wikitext", "prose", "backcopy"]
Split = Literal["train", "validation", "test"]
GENERATED = ("prose", "backcopy")
_OF_FILES = ("pg19", "wikitext")
_CHARACTERS_PER_TOKEN = 8  # generated characters per token; more than any of our tokenizers puts into a token


def texts(
    source: Source, split: Split, book: int | None, seed: int, tokens: int, directory: Path | None
) -> tuple[str, Iterator[Text]]:
    """Return a description of the source, and its texts in order.

    Args:
        book: Project Gutenberg number of the only book to read; None: all books.
        seed: seed of generated text.
        tokens: number of tokens for which generated text must suffice.
        directory: directory of the texts. It may hold several sources, each in a folder of its name.

    Raises:
        UserError: the texts are not available, the book does not exist, or the directory has only a folder of another source.
    """
    if source == "prose":
        return f"prose generated from seed {seed}", iter([Text("prose", Prose(seed).text(_CHARACTERS_PER_TOKEN * tokens))])
    if source == "backcopy":
        return f"Bigram-Backcopy from seed {seed}", iter([Text("backcopy", backcopy.text(seed, tokens))])
    if directory is not None:
        directory = _folder_of(source, directory)
    if source == "wikitext":
        return wikitext.articles(split, directory)
    return pg19.books(split, directory) if book is None else pg19.book(book, split, directory)


def check_folders(sources: Iterable[str], directory: Path) -> None:
    """Check that a directory has a separate folder for each of several sources.

    Raises:
        UserError: the sources would be read from the same files.
    """
    wanted = sorted({*sources}.intersection(_OF_FILES))
    if len(wanted) > 1 and not any((directory / name).is_dir() for name in wanted):
        names = " and ".join(f"'{name}'" for name in wanted)
        raise UserError(f"{directory}: the suite reads {names}: give --data a directory with a folder of each name")


def _folder_of(source: Source, directory: Path) -> Path:
    """Return the folder of a source inside a directory, or the directory itself if it has no folders of sources."""
    if (directory / source).is_dir():
        return directory / source
    if other := next((name for name in _OF_FILES if (directory / name).is_dir()), None):
        raise UserError(f"{directory}: has a folder '{other}', but none '{source}': add one, or give --data another directory")
    return directory
