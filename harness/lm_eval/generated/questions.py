"""Questions made up for models of our own, in the form that lm-eval's `custom_dataset` wants: no download, the same everywhere.

In the prose and the records that the built-in models have read others of: small models, but these they can do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from kvbench.harness.data.prose import FILLERS, WORDS, Prose
from kvbench.harness.data.registers import HEADER, answer, question, record_line

_SEED = 900_000  # of the first text; pretraining and the suites read others
_QUESTIONS = {"train": 50, "test": 200}
_BEFORE = 700  # characters of prose before a question, or a few more: within the training length of our models
_PASSAGE = 1600  # of a passage
_GIVEN = 3  # words of the sentence, at least
_LINES = 3  # of a record
_CHOICES = 4


def cloze(**_: Any) -> dict[str, Dataset]:
    """A passage of generated prose breaks off inside a sentence that it knows by heart: which of four words comes next?"""
    return _splits(_cloze)


def registers(**_: Any) -> dict[str, Dataset]:
    """What the register of a line holds: which of four?"""
    return _splits(_registers)


def passages(**_: Any) -> dict[str, Dataset]:
    """Passages of generated prose, to be scored as a whole."""
    return _splits(_passages)


def _splits(made: Any) -> dict[str, Dataset]:
    questions = made()
    return {split: Dataset.from_list([next(questions) for _ in range(count)]) for split, count in _QUESTIONS.items()}


def _cloze() -> Iterator[dict[str, Any]]:
    draw, seed = random.Random("kvbench_cloze"), _SEED
    fixed = [(words, at) for words in map(str.split, FILLERS) for at, word in enumerate(words) if at >= _GIVEN and word.isalpha()]
    while True:
        seed += 1
        words, at = draw.choice(fixed)
        filled = " ".join(words[:at]).format(**{slot: draw.choice(values) for slot, values in WORDS.items()})
        others = sorted({other[i] for other, i in fixed} - set(words))
        choices = [words[at], *draw.sample(others, _CHOICES - 1)]
        draw.shuffle(choices)
        text = Prose(seed).text(_BEFORE).rstrip() + " " + filled
        yield {"text": text, "choices": choices, "gold": choices.index(words[at]), "answer": words[at]}


def _registers() -> Iterator[dict[str, Any]]:
    draw = random.Random("kvbench_registers")
    while True:
        contents = draw.sample(range(1, 50001), _LINES + _CHOICES)
        asked = draw.randrange(_LINES)
        text = HEADER + "".join(record_line(n, c) for n, c in enumerate(contents[:_LINES], 1)) + question(asked + 1)
        wrong = [c for c in contents[:_LINES] if c != contents[asked]] + contents[_LINES:]
        choices = [contents[asked], *wrong[: _CHOICES - 1]]
        draw.shuffle(choices)
        yield {
            "text": text, "choices": [answer(c).strip() for c in choices], "gold": choices.index(contents[asked]),
            "answer": answer(contents[asked]).strip(),
        }  # fmt: skip


def _passages() -> Iterator[dict[str, Any]]:
    seed = 2 * _SEED
    while True:
        seed += 1
        yield {"text": Prose(seed).text(_PASSAGE)}
