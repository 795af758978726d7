"""ARC: multiple-choice science questions, from a local directory, the local Hugging Face cache or the hub.

Source: Clark et al. 2018, arXiv:1803.05457.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.models.hub import quiet

HUB_ID = "allenai/ai2_arc"
HUB_REVISION = "210d026faf9955653af8916fad021475a3f00453"
_COLUMNS = ("question", "choices", "answerKey")


@dataclass(frozen=True)
class Item:
    """A question with its labelled choices and the label of the right one."""

    question: str
    labels: tuple[str, ...]
    choices: tuple[str, ...]
    answer: str


def items(subset: str, split: str, directory: Path | None) -> tuple[str, list[Item]]:
    """A description of the source, and the questions of "ARC-Easy" or "ARC-Challenge" in order.

    The directory has parquet or JSON-lines files with the hub's columns. Where files or folders are named after subsets or
    splits, only the matching ones are read.

    Raises:
        UserError: no questions were found.
    """
    if directory is None:
        return f"{HUB_ID}@{HUB_REVISION[:8]} {subset} {split}", list(_parsed(_from_hub(subset, split), HUB_ID))
    files = _files(directory, subset, split)
    return f"local {', '.join(f.name for f in files)}", [x for f in files for x in _parsed(_rows(f), str(f))]


def _files(directory: Path, subset: str, split: str) -> list[Path]:
    if not directory.exists():
        raise UserError(f"{directory}: no such directory (--data or BENCH_DATA)")
    paths = [directory] if directory.is_file() else sorted(directory.rglob("*"))
    files = [f for f in paths if f.suffix in (".parquet", ".jsonl")]
    for names, wanted in ((("ARC-Easy", "ARC-Challenge"), subset), (("train", "validation", "test"), split)):
        named = [f for f in files if any(n in str(f.relative_to(directory.parent)) for n in names)]
        files = [f for f in named if wanted in str(f.relative_to(directory.parent))] if named else files
    if not files:
        raise UserError(f"{directory}: no .parquet or .jsonl file of {subset} {split}")
    return files


def _rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.json
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file) if file.suffix == ".parquet" else pyarrow.json.read_json(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not readable ({str(error).splitlines()[0]})") from error
    missing = [c for c in _COLUMNS if c not in table.column_names]
    if missing:
        raise UserError(f"{file}: no column '{missing[0]}', only {', '.join(table.column_names)}")
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: damaged: a row can't be read ({error})") from error
    return rows


def _from_hub(subset: str, split: str) -> Iterable[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError("ARC: loading from the hub needs the package 'datasets'; install it or give --data DIR") from error
    quiet()
    try:
        rows: Iterable[dict[str, Any]] = load_dataset(HUB_ID, subset, revision=HUB_REVISION, split=split)
    except Exception as error:  # datasets raises many kinds when the hub is out of reach
        raise UserError(
            f"ARC: not in the local cache, and the hub is out of reach ({type(error).__name__}); give --data DIR, "
            f"a directory of {HUB_ID}'s parquet files"
        ) from error
    return rows


def _parsed(rows: Iterable[dict[str, Any]], where: str) -> Iterator[Item]:
    for number, row in enumerate(rows):
        try:
            labels, choices = tuple(map(str, row["choices"]["label"])), tuple(map(str, row["choices"]["text"]))
            item = Item(str(row["question"]), labels, choices, str(row["answerKey"]))
        except (KeyError, TypeError) as error:
            raise UserError(f"{where}: row {number} does not follow ARC's schema ({type(error).__name__}: {error})") from None
        if item.answer not in labels or len(labels) != len(choices):
            raise UserError(f"{where}: row {number}: answer '{item.answer}' is not one of the choices")
        yield item
