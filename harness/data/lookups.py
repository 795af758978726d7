"""Texts that tell something and ask for it later: what a model must learn to look up, for training and for questions.

Each kind isolates one thing: a value by its name, several values, two look-ups in a row, one sentence in other text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.harness.data.registers import answer, question, record_line

FIXED = (  # what stands around names and values: one token each in our models' tokenizer
    ": REGISTER_CONTENT is <",
    "Question: What is the REGISTER_CONTENT of line ",
    "?\nAnswer:",
    ">\n",
    " <",
    " = ",
    " = #",
    "Question: What is #",
    "Question: What does #",
    " lead to?\nAnswer:",
)
PLACES = [
    "Arlen",
    "Bexford",
    "Corvey",
    "Dunmore",
    "Eastlow",
    "Farley",
    "Gillan",
    "Holm",
    "Istow",
    "Jarrow",
    "Kelby",
    "Lorne",
    "Marsh",
    "Norwell",
    "Oxley",
    "Penrith",
    "Quorn",
    "Ripley",
    "Selby",
    "Thorpe",
    "Upton",
    "Velden",
    "Wick",
    "Yarrow",
]
KINDS = ("recent", "once", "popular", "distracted", "values", "chain", "needle")  # of the questions in kvbench_recall
_ASKED = 0.35  # questions a line, on average, once there is a line


@dataclass
class Lookups:
    """A text, and where its answers are."""

    text: str = ""
    answers: list[tuple[int, int]] = field(default_factory=list)  # (start, end) in characters, of what follows from before
    counted: list[tuple[int, int]] = field(default_factory=list)  # the same, of what else counts fully in the loss

    def ask(self, prompt: str, completion: str) -> None:
        """Append a question and its answer."""
        self.text += prompt
        self.count(completion, is_answer=True)

    def count(self, text: str, is_answer: bool) -> None:
        """Append what counts fully in the loss."""
        start = len(self.text)
        self.text += text
        (self.answers if is_answer else self.counted).append((start, len(self.text)))


def registers(draw: random.Random, lines: int) -> Lookups:
    """StreamEval's record: numbered lines, and questions about any line before."""
    result, first, contents = Lookups(), 1 if draw.random() < 0.3 else draw.randrange(1, 10_000 - lines), []
    for number in range(first, first + lines):
        contents.append(draw.randint(1, 50_000))
        result.text += record_line(number, contents[-1])
        while draw.random() < _ASKED / (1 + _ASKED):
            index = draw.randrange(len(contents))
            result.ask(question(first + index), answer(contents[index]))
    return result


def key_line(key: int, values: list[int]) -> str:
    """A line that gives a key its values."""
    return f"#{key} = {' '.join(map(str, values))}\n"


def key_question(key: int) -> str:
    """The question about all values of a key."""
    return f"Question: What is #{key}?\nAnswer:"


def key_answer(values: list[int]) -> str:
    """The right answer, as it stays in the text."""
    return f" {' '.join(map(str, values))}\n"


def keys(draw: random.Random, lines: int) -> Lookups:
    """Keys in no order, with one to four values each."""
    result, known = Lookups(), draw.sample(range(1, 1000), lines)
    values: list[list[int]] = []
    for key in known:
        values.append([draw.randrange(1, 1000) for _ in range(draw.randint(1, 4))])
        result.text += key_line(key, values[-1])
        while draw.random() < _ASKED / (1 + _ASKED):
            index = draw.randrange(len(values))
            result.ask(key_question(known[index]), key_answer(values[index]))
    return result


def pointer_line(key: int, other: int) -> str:
    """A line that names another key instead of a value."""
    return f"#{key} = #{other}\n"


def chain_question(key: int) -> str:
    """The question about the value of the key that a key names."""
    return f"Question: What does #{key} lead to?\nAnswer:"


def chain_answer(key: int, value: int) -> str:
    """The right answer: the key that is named, and its value."""
    return f" {key} {value}\n"


def chains(draw: random.Random, lines: int) -> Lookups:
    """Keys that name other keys, which hold a value: two look-ups a question. Half of the lines come before what they need."""
    result, pairs = Lookups(), max(1, lines // 2)
    drawn = draw.sample(range(1, 1000), 2 * pairs)
    held = {key: draw.randrange(1, 1000) for key in drawn[pairs:]}
    order = [(key, None) for key in held] + list(zip(drawn[:pairs], held, strict=True))
    draw.shuffle(order)
    known: set[int] = set()
    for key, other in order:
        result.text += key_line(key, [held[key]]) if other is None else pointer_line(key, other)
        known.add(key)
        answerable = [(a, b) for a, b in zip(drawn[:pairs], held, strict=True) if a in known and b in known]
        while answerable and draw.random() < _ASKED / (1 + _ASKED):
            a, b = draw.choice(answerable)
            result.ask(chain_question(a), chain_answer(b, held[b]))
    return result


def is_exact(completion: str, answer: str) -> bool:
    """Whether what was said, up to a stop string and without surrounding whitespace, is the answer and nothing else."""
    return completion.strip() == answer


def is_contained(completion: str, answer: str) -> bool:
    """Whether a completion contains the answer as whole words, whatever the case and spaces, and does not deny it.

    A number that is part of a longer one (1534, 5.34, -534) is another number.
    """
    words = r"\s+".join(re.escape(word) for word in answer.split())
    whole = rf"(?<![\w-])(?<!\d[.,])(?<!\bnot\s)(?<!n't\s){words}(?!['-]?\w)(?![.,]\d)"
    return bool(words) and re.search(whole, completion, re.IGNORECASE) is not None


def scores(document: Mapping[str, Any], completions: list[str]) -> dict[str, float]:
    """Return the exact and the lenient score of a completion, which lm-eval has already cut at the stop string."""
    completion, answer = completions[0], document["answer"]
    return {"exact_match": float(is_exact(completion, answer)), "contained": float(is_contained(completion, answer))}


def needle(place: str, number: int) -> str:
    """A sentence that stands in other text."""
    return f" The secret number of {place} = {number}. "


def needle_question(place: str) -> str:
    """The question about a needle."""
    return f"\nQuestion: What is the secret number of {place}?\nAnswer:"


def needle_answer(number: int) -> str:
    """The right answer to the question about a needle."""
    return f" {number}.\n"
