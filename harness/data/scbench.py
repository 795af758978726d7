"""SCBench: questions in turns about one long context, from a local directory, the local Hugging Face cache or the hub.

Source: Li et al. 2024, arXiv:2412.10319; prompts and scores of its released code, github.com/microsoft/MInference, `scbench/`.
Differs: prompts are plain text, without a chat template, and contexts are read whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvbench.harness.core.errors import UserError
from kvbench.harness.data import tables
from kvbench.harness.data.quiz import Script

HUB_ID = "microsoft/SCBench"
HUB_REVISION = "fcebb7411ecee50a0d8870d01eaed7c7452942fe"
PROMPTS = {  # text before the question, for the subsets in which an answer is right if it contains the right string
    "scbench_kv": "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n",
    "scbench_prefix_suffix": "{context}\n\n",
}
MOST_ANSWER_TOKENS = 150  # in both subsets


def conversations(subset: str, turns: int, contexts: int, directory: Path | None) -> tuple[str, list[Script]]:
    """Return a description of the source, and the first contexts of a subset, each with its first turns.

    The directory has parquet or JSON-lines files with the hub's columns. Where files or folders are named after subsets, only
    the matching files are read.

    Raises:
        UserError: the subset has too few contexts or turns, or a row does not follow the schema.
    """
    if directory is None:
        data_files = {"test": f"{subset}/test-*.parquet"}
        rows = tables.hub_rows("SCBench", HUB_ID, revision=HUB_REVISION, data_files=data_files, split="test")
        source = place = f"{HUB_ID}@{HUB_REVISION[:8]} {subset}"
    else:
        files = tables.files(directory, (tuple(PROMPTS), subset))
        rows = (row for file in files for row in tables.rows(file, ("context", "multi_turns")))
        source, place = f"local {', '.join(f.name for f in files)}", str(directory)
    scripts = list(_scripts(rows, subset, turns, contexts, place))
    if len(scripts) < contexts:
        raise UserError(f"{place}: has {len(scripts)} contexts, not {contexts}; set streams lower")
    return source, scripts


def _scripts(rows: Iterable[dict[str, Any]], subset: str, turns: int, contexts: int, place: str) -> Iterator[Script]:
    """Yield the conversations of the first rows."""
    for number, (row, _) in enumerate(zip(rows, range(contexts), strict=False)):
        try:
            pairs = [(str(turn["input"]), str(turn["answer"])) for turn in row["multi_turns"]]
            script = Script(PROMPTS[subset].format(context=row["context"]), by_parts=True)
        except (KeyError, TypeError) as error:
            raise UserError(f"{place}: row {number} does not follow SCBench's schema ({type(error).__name__}: {error})") from None
        if len(pairs) < turns:
            raise UserError(f"{place}: row {number} has {len(pairs)} turns, not {turns}; set turns lower")
        script.prompt = len(script.text)
        for turn, (question, answer) in enumerate(pairs[:turns], 1):
            script.ask(question, answer, f"{answer}\n\n", turn=turn, kind="text")
        yield script


def is_right(completion: str, gold: str) -> bool:
    """Whether a completion contains the right string."""
    return gold in completion
