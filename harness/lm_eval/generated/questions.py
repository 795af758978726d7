"""Generated questions in the form of lm-eval's `custom_dataset`, which need no download and are equal on every machine.

The questions use the kinds of prose and records on which the built-in models were trained, so that small models can answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from kvbench.harness.data.lookups import REGISTER_HEADER, register_answer, register_line, register_question
from kvbench.harness.data.prose import FILLERS, WORDS, Prose

_SEED = 900_000  # seed of the first text; pretraining and the suites use other seeds
_QUESTIONS = {"train": 50, "test": 200}
_MIN_CONTEXT_CHARACTERS = 700  # characters of prose before a question; fits the training length of our models
_PASSAGE_CHARACTERS = 1600
_MIN_GIVEN_WORDS = 3
_RECORD_LINES = 3
_CHOICES = 4


def cloze(**_: Any) -> dict[str, Dataset]:
    """Ask which of four words continues a passage of generated prose that breaks off in a fixed sentence."""
    return _splits(_cloze)


def registers(**_: Any) -> dict[str, Dataset]:
    """Ask which of four numbers the register of a record's line holds."""
    return _splits(_registers)


def passages(**_: Any) -> dict[str, Dataset]:
    """Return passages of generated prose that are scored as a whole."""
    return _splits(_passages)


def _splits(generate: Any) -> dict[str, Dataset]:
    questions = generate()
    return {split: Dataset.from_list([next(questions) for _ in range(count)]) for split, count in _QUESTIONS.items()}


def _cloze() -> Iterator[dict[str, Any]]:
    draw, seed = random.Random("kvbench_cloze"), _SEED
    sentences = [sentence.split() for sentence in FILLERS]
    gaps = [(s, i) for s in sentences for i, word in enumerate(s) if i >= _MIN_GIVEN_WORDS and word.isalpha()]
    while True:
        seed += 1
        words, gap = draw.choice(gaps)
        filled = " ".join(words[:gap]).format(**{slot: draw.choice(values) for slot, values in WORDS.items()})
        others = sorted({other[i] for other, i in gaps} - set(words))
        choices = [words[gap], *draw.sample(others, _CHOICES - 1)]
        draw.shuffle(choices)
        text = Prose(seed).text(_MIN_CONTEXT_CHARACTERS).rstrip() + " " + filled
        yield {"text": text, "choices": choices, "gold": choices.index(words[gap]), "answer": words[gap]}


def _registers() -> Iterator[dict[str, Any]]:
    draw = random.Random("kvbench_registers")
    while True:
        contents = draw.sample(range(1, 50001), _RECORD_LINES + _CHOICES)
        line = draw.randrange(_RECORD_LINES)
        lines = "".join(register_line(n, c) for n, c in enumerate(contents[:_RECORD_LINES], 1))
        text = REGISTER_HEADER + lines + register_question(line + 1)
        wrong = [c for c in contents[:_RECORD_LINES] if c != contents[line]] + contents[_RECORD_LINES:]
        choices = [contents[line], *wrong[: _CHOICES - 1]]
        draw.shuffle(choices)
        yield {
            "text": text,
            "choices": [register_answer(c).strip() for c in choices],
            "gold": choices.index(contents[line]),
            "answer": register_answer(contents[line]).strip(),
        }


def _passages() -> Iterator[dict[str, Any]]:
    seed = 2 * _SEED
    while True:
        seed += 1
        yield {"text": Prose(seed).text(_PASSAGE_CHARACTERS)}
