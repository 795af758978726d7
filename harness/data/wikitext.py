"""WikiText-2: Wikipedia articles, from a local directory, the local Hugging Face cache or the hub.

Source: Merity et al. 2016, arXiv:1609.07843, the raw edition: no word is replaced by `<unk>`.
Differs: a split is one text, with its lines as they stand in the file, blank lines included (`" \\n"`). Hugging Face's guide to
perplexity puts two newlines between the lines instead, and lm-eval's task `wikitext` scores each article by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import read_utf8
from kvbench.harness.data.data_files import files_below, of_split
from kvbench.harness.data.stream import Text
from kvbench.harness.data.tables import hub_rows, text_rows

HUB_ID = "Salesforce/wikitext"
HUB_CONFIG = "wikitext-2-raw-v1"
HUB_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
_BLANK = " \n"  # a blank line, which the hub's edition has as an empty row
_ROWS = 4096  # rows of a parquet file that are read at once


def articles(split: str, directory: Path | None) -> tuple[str, Iterator[Text]]:
    """Return a description of the source, and the one text of a split.

    The directory has `wiki.test.raw`, `wiki.valid.raw` and `wiki.train.raw`, or the hub's parquet files. The files may be in a
    folder `wikitext-2-raw-v1`. `directory` may also be one such file.

    Raises:
        UserError: the directory has no text or texts of several editions, or the directory or the hub can't be reached.
    """
    title = f"WikiText-2 {split}"
    if directory is None:
        lines = hub_rows("wikitext", HUB_ID, HUB_CONFIG, revision=HUB_REVISION, split=split)
        return f"{HUB_ID}@{HUB_REVISION[:8]} {HUB_CONFIG} {split}", iter([Text(title, _joined(lines))])
    files = _files(directory, split)
    return f"local {files[0].name}", iter([Text(title, "".join(map(_text, files)))])


def _files(directory: Path, split: str) -> list[Path]:
    """Return the files of a split: one `.raw` file, or the parts of a parquet file."""
    files = files_below(directory, (".raw", ".parquet"))
    files = [f for f in files if f.parent.name == HUB_CONFIG] or [f for f in files if f.suffix.lower() == ".raw"] or files
    if not files:
        raise UserError(f"{directory}: no WikiText-2 (wiki.{split}.raw, or the parquet files of {HUB_ID}, {HUB_CONFIG})")
    chosen = of_split(directory, files, split)
    if len({f.parent for f in chosen}) > 1 or (chosen[0].suffix.lower() == ".raw" and len(chosen) > 1):
        names = ", ".join(str(f.relative_to(directory)) for f in chosen)
        raise UserError(f"{directory}: several texts of the split '{split}': {names}; give --data the folder of one")
    return chosen


def _text(file: Path) -> str:
    return read_utf8(file) if file.suffix.lower() == ".raw" else _joined(text_rows(file, at_once=_ROWS))


def _joined(lines: Iterable[dict[str, Any]]) -> str:
    """Return the rows of the hub's edition as the text of the raw file."""
    return "".join(line["text"] or _BLANK for line in lines)
