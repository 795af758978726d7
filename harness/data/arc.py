"""ARC: multiple-choice science questions, from a local directory, the local Hugging Face cache or the hub.

Source: Clark et al. 2018, arXiv:1803.05457.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.data import tables
from kvbench.harness.data.data_files import SPLITS

HUB_ID = "allenai/ai2_arc"
HUB_REVISION = "210d026faf9955653af8916fad021475a3f00453"
SUBSETS = ("ARC-Easy", "ARC-Challenge")
_COLUMNS = ("question", "choices", "answerKey")


@dataclass(frozen=True)
class Item:
    """A question with its labelled choices and the label of the right one."""

    question: str
    labels: tuple[str, ...]
    choices: tuple[str, ...]
    answer: str


def items(subset: str, split: str, directory: Path | None) -> tuple[str, list[Item]]:
    """Return a description of the source, and the questions of "ARC-Easy" or "ARC-Challenge" in order.

    The directory has parquet or JSON-lines files with the hub's columns. Where files or folders are named after subsets or
    splits, only the matching files are read.

    Raises:
        UserError: no questions were found.
    """
    if directory is None:
        rows = tables.hub_rows("ARC", HUB_ID, subset, revision=HUB_REVISION, split=split)
        return f"{HUB_ID}@{HUB_REVISION[:8]} {subset} {split}", list(_parsed(rows, HUB_ID))
    files = tables.files(directory, (SUBSETS, subset), (SPLITS, split))
    return f"local {', '.join(f.name for f in files)}", [x for f in files for x in _parsed(tables.rows(f, _COLUMNS), str(f))]


def _parsed(rows: Iterable[dict[str, Any]], source: str) -> Iterator[Item]:
    for number, row in enumerate(rows):
        try:
            labels, choices = tuple(map(str, row["choices"]["label"])), tuple(map(str, row["choices"]["text"]))
            item = Item(str(row["question"]), labels, choices, str(row["answerKey"]))
        except (KeyError, TypeError) as error:
            raise UserError(f"{source}: row {number} does not follow ARC's schema ({type(error).__name__}: {error})") from None
        if item.answer not in labels or len(labels) != len(choices):
            raise UserError(f"{source}: row {number}: answer '{item.answer}' is not one of the choices")
        yield item
