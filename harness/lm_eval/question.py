"""Finds where the question begins in a prompt, for tasks whose prompt is a long text and a question about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_AFTER_A_TEXT = r"\nQuestion: "
_PATTERNS = (  # names of tasks, and what the question begins with
    ("kvbench_(?!cloze|prose).*|ruler_.*", _AFTER_A_TEXT),
    ("kvbench_cloze.*", r"(?<=[.!?])\s[^.!?]*$"),  # the sentence that breaks off
    ("niah_.*", r"\nWhat (is|are all) the special magic "),
)


def question_start(prompt: str, task: str, document: Mapping[str, Any], pattern: str | None = None) -> int:
    """The index of the question's first character: the last match of a pattern or, in LongBench, the end of the context.

    Args:
        prompt: with examples and chat template, if there are any.
        task: name of lm-eval's task.
        document: that the prompt was made of.
        pattern: regular expression that the question begins with; known for RULER and our tasks.

    Raises:
        ValueError: there is no question, or nothing before it.
    """
    pattern = pattern or next((p for names, p in _PATTERNS if re.fullmatch(names, task)), None)
    start = -1
    if pattern is not None:
        start = max((match.start() for match in re.finditer(pattern, prompt)), default=-1)
    elif isinstance(document.get("context"), str) and document["context"] in prompt:
        start = prompt.rindex(document["context"]) + len(document["context"])
    if not 0 < start < len(prompt):
        what = "it has no context before it" if pattern is None else f"nothing before its end matches {pattern!r}"
        raise ValueError(f"{task}: where does the question begin? {what}; give question_from: REGEX")
    return start


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
