"""Record-and-query text for StreamEval, an lm-eval task and pretraining: numbered lines, and questions about them."""

from __future__ import annotations

import re

HEADER = "A record of numbered lines follows. Remember what the register of every line holds.\n"


def record_line(number: int, content: int) -> str:
    """Return a line of the record."""
    return f"line {number}: REGISTER_CONTENT is <{content}>\n"


def question(number: int) -> str:
    """Return the question about a line."""
    return f"Question: What is the REGISTER_CONTENT of line {number}?\nAnswer:"


def answer(content: int) -> str:
    """Return the right answer in the form that follows the question in the stream."""
    return f" <{content}>\n"


def stated_value(completion: str) -> str:
    """Return the answer in a completion: the first line, without surrounding spaces, angle brackets and full stop."""
    first = completion.lstrip().split("\n", 1)[0]
    return re.sub(r"^[\s<]+|[\s>.]+$", "", first)
