"""Texts that state values and ask for them later, for training models on look-ups and for questions.

Each kind isolates one ability: to find a value by its name, several values, a value by two look-ups, or one sentence in a text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIXED = (  # strings around names and values; each is one token in our models' tokenizer
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
REGISTER_HEADER = "A record of numbered lines follows. Remember what the register of every line holds.\n"
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
KINDS = ("recent", "once", "popular", "distracted", "values", "chain", "needle")  # kinds of questions in kvbench_recall
_ASKED = 0.35  # mean number of questions after each line


@dataclass
class Lookups:
    """A text, and the places of its answers."""

    text: str = ""
    answers: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of text that follows from earlier text
    counted: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of other text that counts fully in the loss

    def ask(self, prompt: str, completion: str) -> None:
        """Append a question and its answer."""
        self.text += prompt
        self.count(completion, is_answer=True)

    def count(self, text: str, is_answer: bool) -> None:
        """Append text that counts fully in the loss."""
        start = len(self.text)
        self.text += text
        (self.answers if is_answer else self.counted).append((start, len(self.text)))


def register_line(number: int, content: int) -> str:
    """Return a line of StreamEval's record."""
    return f"line {number}: REGISTER_CONTENT is <{content}>\n"


def register_question(number: int) -> str:
    """Return the question about a line."""
    return f"Question: What is the REGISTER_CONTENT of line {number}?\nAnswer:"


def register_answer(content: int) -> str:
    """Return the right answer in the form that follows the question in the stream."""
    return f" <{content}>\n"


def registers(draw: random.Random, lines: int) -> Lookups:
    """Return StreamEval's record: numbered lines, and questions about any earlier line."""
    result, first, contents = Lookups(), 1 if draw.random() < 0.3 else draw.randrange(1, 10_000 - lines), []
    for number in range(first, first + lines):
        contents.append(draw.randint(1, 50_000))
        result.text += register_line(number, contents[-1])
        while draw.random() < _ASKED / (1 + _ASKED):
            index = draw.randrange(len(contents))
            result.ask(register_question(first + index), register_answer(contents[index]))
    return result


def key_line(key: int, values: list[int]) -> str:
    """Return a line that gives a key its values."""
    return f"#{key} = {' '.join(map(str, values))}\n"


def key_question(key: int) -> str:
    """Return the question about all values of a key."""
    return f"Question: What is #{key}?\nAnswer:"


def key_answer(values: list[int]) -> str:
    """Return the right answer in the form that follows the question in the text."""
    return f" {' '.join(map(str, values))}\n"


def keys(draw: random.Random, lines: int) -> Lookups:
    """Return a text of keys in random order, with one to four values each."""
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
    """Return a line that names another key instead of a value."""
    return f"#{key} = #{other}\n"


def chain_question(key: int) -> str:
    """Return the question about the value of the key that a key names."""
    return f"Question: What does #{key} lead to?\nAnswer:"


def chain_answer(key: int, value: int) -> str:
    """Return the right answer: the key that is named, and its value."""
    return f" {key} {value}\n"


def chains(draw: random.Random, lines: int) -> Lookups:
    """Return a text of keys that name other keys, which have a value, so that a question needs two look-ups.

    On average, half of the lines that name a key come before the line of that key.
    """
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


def stated_value(completion: str) -> str:
    """Return the answer in a completion: the first line, without surrounding spaces, angle brackets and full stop."""
    first = completion.lstrip().split("\n", 1)[0]
    return re.sub(r"^[\s<]+|[\s>.]+$", "", first)


def is_exact(completion: str, answer: str) -> bool:
    """Whether a completion, without surrounding whitespace, equals the answer."""
    return completion.strip() == answer


def is_contained(completion: str, answer: str) -> bool:
    """Whether a completion contains the answer as whole words, ignoring case and spaces, and not after a negation.

    A number inside a longer number (534 in 1534, 5.34 or -534) does not count.
    """
    words = r"\s+".join(re.escape(word) for word in answer.split())
    whole = rf"(?<![\w-])(?<!\d[.,])(?<!\bnot\s)(?<!n't\s){words}(?!['-]?\w)(?![.,]\d)"
    return bool(words) and re.search(whole, completion, re.IGNORECASE) is not None


def scores(document: Mapping[str, Any], completions: list[str]) -> dict[str, float]:
    """Return the exact and the lenient score of a completion, which lm-eval has already cut at the stop string."""
    completion, answer = completions[0], document["answer"]
    return {"exact_match": float(is_exact(completion, answer)), "contained": float(is_contained(completion, answer))}


def needle(place: str, number: int) -> str:
    """Return a sentence to be hidden in other text."""
    return f" The secret number of {place} = {number}. "


def needle_question(place: str) -> str:
    """Return the question about a needle."""
    return f"\nQuestion: What is the secret number of {place}?\nAnswer:"


def needle_answer(number: int) -> str:
    """Return the right answer to the question about a needle."""
    return f" {number}.\n"
