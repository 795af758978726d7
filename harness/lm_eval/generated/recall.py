"""Questions at the end of a long text. Each kind needs tokens that another kind of policy would evict.

The questions have the form of lm-eval's `custom_dataset`, need no download and are equal on every machine.
docs/tasks/recall.md describes the ability that each kind isolates.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from datasets import Dataset

from kvbench.harness.data import lookups
from kvbench.harness.data.prose import Prose

_QUESTIONS = {"train": 50, "test": 200}
_KEYS = 40  # lines of a text; 200 to 440 tokens where numbers below 1,000 are one token
_RECENT = 5  # lines at the end; `recent` asks for one of them
_POPULAR, _ASKED = 3, 10  # number of keys that are asked for in the middle of a text, and of questions about them in total
_PROSE_CHARACTERS = 1200
_PROSE_SEED = 1_800_000  # seed of the first passage; pretraining and the suites use other seeds
Document = dict[str, Any]


def recent(**_: Any) -> dict[str, Dataset]:
    """Ask for one of the last five keys."""
    return _splits("recent", lambda draw: _key_question(draw, range(_KEYS - _RECENT, _KEYS)))


def once(**_: Any) -> dict[str, Dataset]:
    """Ask for a key that was stated once, in the first half."""
    return _splits("once", lambda draw: _key_question(draw, range(_KEYS // 2)))


def anywhere(**_: Any) -> dict[str, Dataset]:
    """Ask for a key that was stated once, anywhere in the text."""
    return _splits("anywhere", lambda draw: _key_question(draw, range(_KEYS)))


def popular(**_: Any) -> dict[str, Dataset]:
    """Ask for a key that was stated in the first half and asked for repeatedly."""
    return _splits("popular", partial(_after_questions, popular=True))


def distracted(**_: Any) -> dict[str, Dataset]:
    """Ask for a key that was stated once, in the first half. Other keys, now useless, were asked for repeatedly."""
    return _splits("distracted", partial(_after_questions, popular=False))


def values(**_: Any) -> dict[str, Dataset]:
    """Ask for all four values of a key."""
    return _splits("values", lambda draw: _key_question(draw, range(_KEYS // 2), count=4))


def chain(**_: Any) -> dict[str, Dataset]:
    """Ask for the key that another key names, and for its value."""
    return _splits("chain", _chain)


def needle(**_: Any) -> dict[str, Dataset]:
    """Ask for the number in a sentence that is hidden in unrelated prose."""
    return _splits("needle", _needle)


def _splits(name: str, generate: Callable[[random.Random], Document]) -> dict[str, Dataset]:
    draw = random.Random(f"kvbench_{name}")
    return {split: Dataset.from_list([generate(draw) for _ in range(count)]) for split, count in _QUESTIONS.items()}


def _question(text: str, evidence: str, question: str, answer: str) -> Document:
    """Return a question about the evidence in a text. Its depth is the place of the evidence, from 0 to 1."""
    return {"text": text + question, "answer": answer.strip().rstrip("."), "depth": round(text.index(evidence) / len(text), 4)}


def _records(draw: random.Random, count: int = 1) -> dict[int, list[int]]:
    """Draw keys with their values, in the order in which the text states them."""
    return {key: [draw.randrange(1, 1000) for _ in range(count)] for key in draw.sample(range(1, 1000), _KEYS)}


def _key_question(draw: random.Random, places: range, count: int = 1) -> Document:
    """Return a text of keys, and a question about one of the keys at `places`."""
    records = _records(draw, count)
    key = list(records)[draw.choice(places)]
    text = "".join(lookups.key_line(*record) for record in records.items())
    return _question(text, lookups.key_line(key, records[key]), lookups.key_question(key), lookups.key_answer(records[key]))


def _after_questions(draw: random.Random, popular: bool) -> Document:
    """Return a text of keys with questions about a few keys in between, and a final question.

    The final question is about one of the few keys if `popular`, else about a key that was never asked for.
    """
    records = _records(draw)
    keys = list(records)
    known = draw.sample(keys[: _KEYS // 4], _POPULAR)
    others = [key for key in keys[: _KEYS // 2] if key not in known]
    after = sorted(draw.randrange(_KEYS // 4, _KEYS - _RECENT) for _ in range(_ASKED))
    text, questioned = "", list[int]()
    for place, record in enumerate(records.items()):
        text += lookups.key_line(*record)
        for _ in range(after.count(place)):
            questioned.append(draw.choice(known))
            text += lookups.key_question(questioned[-1]) + lookups.key_answer(records[questioned[-1]])
    key = draw.choice(questioned if popular else others)
    return _question(text, lookups.key_line(key, records[key]), lookups.key_question(key), lookups.key_answer(records[key]))


def _chain(draw: random.Random) -> Document:
    """Return a text in which half of the keys name a key of the other half. Either key of a pair may come first."""
    records = _records(draw)
    keys = draw.sample(list(records), _KEYS)
    names = dict(zip(keys[: _KEYS // 2], keys[_KEYS // 2 :], strict=True))
    text = "".join(
        lookups.pointer_line(key, names[key]) if key in names else lookups.key_line(key, value) for key, value in records.items()
    )
    key = draw.choice(list(names))
    line, answer = lookups.pointer_line(key, names[key]), lookups.chain_answer(names[key], *records[names[key]])
    return _question(text, line, lookups.chain_question(key), answer)


def _needle(draw: random.Random) -> Document:
    sentences = _sentences(draw)
    place, number = draw.choice(lookups.PLACES), draw.randrange(1, 1000)
    cut = draw.randrange(len(sentences) // 2)
    text = " ".join(sentences[:cut]) + lookups.needle(place, number) + " ".join(sentences[cut:])
    sentence = lookups.needle(place, number)
    return _question(text, sentence, lookups.needle_question(place), lookups.needle_answer(number))


def _sentences(draw: random.Random) -> list[str]:
    text = Prose(_PROSE_SEED + draw.randrange(10_000)).text(_PROSE_CHARACTERS)
    return [f"{sentence}." for sentence in text.replace("\n", " ").split(". ")[:-1]]
