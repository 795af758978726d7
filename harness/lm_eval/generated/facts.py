"""Facts in prose, asked for as lines to complete: questions for models that were trained on ordinary text.

The questions have the form of lm-eval's `custom_dataset`. docs/tasks/recall.md describes the ability that each kind isolates.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from kvbench.harness.core.errors import UserError
from kvbench.harness.data import lookups, pg19
from kvbench.harness.data.prose import Prose

_QUESTIONS = {"train": 50, "test": 200}
_CHARACTERS = 1200  # characters of prose in a text, about 300 tokens
_PROSE_SEED = 2_800_000  # seed of the first passage; pretraining and the suites use other seeds
_GOLDEN_RATIO = 0.6180339887498949  # any number of its multiples, modulo 1, is spread evenly over 0 to 1
Document = dict[str, Any]


class Kind(NamedTuple):
    """Kind of question.

    Attributes:
        facts: number of facts in a text, each about a different place.
        values: number of values of a fact.
        retellings: number of times that a fact about another place, or the fact that is asked for, is repeated.
        asks_repeated: whether the question is about the repeated fact.
        depths: range of the depth of the fact that is asked for, from 0 (beginning of the text) to 1 (end).
    """

    facts: int = 1
    values: int = 1
    retellings: int = 0
    asks_repeated: bool = True
    depths: tuple[float, float] = (0.0, 1.0)


_NEEDLE = Kind()


def needle(**_: Any) -> dict[str, Dataset]:
    """Ask for a single fact, at any depth of generated prose."""
    return _splits("needle", _NEEDLE, _generated_prose())


def book(data: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Ask for a single fact, at any depth of a passage from a book.

    Args:
        data: folder of books; None: the hub's PG-19.
    """
    return _splits("book", _NEEDLE, _book_passages(None if data is None else Path(data)))


def distracted(**_: Any) -> dict[str, Dataset]:
    """Ask for the unrepeated fact of two that differ in the name of the place; the repeated fact is told three more times."""
    return _splits("distracted", Kind(facts=2, retellings=3, asks_repeated=False, depths=(0.0, 0.5)), _generated_prose())


def popular(**_: Any) -> dict[str, Dataset]:
    """Ask for a fact that is repeated three times."""
    return _splits("popular", Kind(facts=2, retellings=3, depths=(0.0, 0.5)), _generated_prose())


def values(**_: Any) -> dict[str, Dataset]:
    """Ask for both values of a fact with two values."""
    return _splits("values", Kind(values=2), _generated_prose())


def recent(**_: Any) -> dict[str, Dataset]:
    """Ask for one of three facts in the last tenth of the text."""
    return _splits("recent", Kind(facts=3, depths=(0.9, 1.0)), _generated_prose())


def _splits(name: str, kind: Kind, passages: Iterator[str]) -> dict[str, Dataset]:
    draw, depths = random.Random(f"kvbench_facts_{name}"), _even_depths(*kind.depths)
    return {
        split: Dataset.from_list([_document(kind, next(passages), next(depths), draw) for _ in range(count)])
        for split, count in _QUESTIONS.items()
    }


def _even_depths(low: float, high: float) -> Iterator[float]:
    for number in itertools.count():
        yield low + (high - low) * (number * _GOLDEN_RATIO % 1)


def _document(kind: Kind, passage: str, depth: float, draw: random.Random) -> Document:
    """Return a passage with facts among its sentences, followed by the beginning of the sentence of one fact."""
    places = draw.sample(lookups.PLACES, kind.facts)
    low = 10_000 if kind.values == 1 else 100
    answers = [" and ".join(str(draw.randrange(low, 10 * low)) for _ in range(kind.values)) for _ in places]
    facts = [f"{_opening(place, kind.values)} {answer}." for place, answer in zip(places, answers, strict=True)]
    placed_facts = [(depth, facts[0]), *((draw.random(), fact) for fact in facts[1:])]
    repeated, first = (facts[0], depth) if kind.asks_repeated else (facts[1], placed_facts[1][0])
    placed_facts += [(draw.uniform(first, max(first, 0.8)), f"Everyone knows: {repeated}") for _ in range(kind.retellings)]
    text = _with_facts(re.split(r"(?<=[.!?])\s+", passage), placed_facts)
    return {
        "text": f"{text}\n\n{_opening(places[0], kind.values)}",
        "answer": answers[0],
        "depth": round(text.index(facts[0]) / len(text), 4),
    }


def _opening(place: str, values: int) -> str:
    return f"The account number of {place} is" if values == 1 else f"The two account numbers of {place} are"


def _with_facts(sentences: list[str], placed_facts: list[tuple[float, str]]) -> str:
    """Return the text of the sentences with the facts inserted, each at its depth."""
    places = [((number + 0.5) / len(sentences), sentence) for number, sentence in enumerate(sentences)]
    return " ".join(sentence for _, sentence in sorted([*places, *placed_facts], key=lambda placed: placed[0]))


def _generated_prose() -> Iterator[str]:
    for seed in itertools.count(_PROSE_SEED):
        yield _whole_sentences(Prose(seed).text(_CHARACTERS))


def _book_passages(folder: Path | None) -> Iterator[str]:
    source, books = pg19.books("test", folder)
    words, count = " ".join(word for book in books for word in book.text.split()), sum(_QUESTIONS.values())
    step = (len(words) - 2 * _CHARACTERS) // count
    if step < _CHARACTERS:
        raise UserError(f"{source}: too short for {count} passages of {_CHARACTERS:,} characters")
    return (_whole_sentences(words[start : start + 2 * _CHARACTERS]) for start in range(0, step * count, step))


def _whole_sentences(text: str) -> str:
    """Return the sentences of a text from the second on, with at most `_CHARACTERS` characters in total."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))[1:-1]
    ends = itertools.accumulate(len(sentence) + 1 for sentence in sentences)
    return " ".join(sentence for sentence, end in zip(sentences, ends, strict=True) if end <= _CHARACTERS)
