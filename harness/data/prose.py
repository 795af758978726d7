"""Seeded, endless prose about people, things and places, in which facts recur at known distances.

The cost of forgetting a fact is known in advance. A fact's words are drawn uniformly, so their first statement costs their
entropy. A later statement costs nothing if the model still has an earlier one, and the full entropy otherwise
(docs/data/prose.md).

All words are drawn from the lists below; the text contains nothing from other sources.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ONSETS = ["b", "br", "c", "cl", "d", "dr", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w"]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "oo"]
ENDINGS = ["n", "l", "r", "s", "m", "th", "nd", "ck", "sh", "ll"]
TRADES = [
    "baker",
    "weaver",
    "smith",
    "miller",
    "sailor",
    "teacher",
    "painter",
    "doctor",
    "farmer",
    "fisher",
    "tailor",
    "carpenter",
    "printer",
    "gardener",
    "shepherd",
    "mason",
]
THINGS = [
    "a silver key",
    "a blue lamp",
    "an old map",
    "a clay pipe",
    "a brass bell",
    "a red scarf",
    "a small mirror",
    "a wooden flute",
    "a green bottle",
    "a black umbrella",
    "a paper kite",
    "a stone cup",
    "a leather book",
    "a white candle",
    "a copper coin",
    "a glass bead",
]
PLACES = [
    "the harbour",
    "the mill",
    "the bridge",
    "the chapel",
    "the market",
    "the orchard",
    "the lighthouse",
    "the quarry",
    "the stables",
    "the well",
    "the tower",
    "the ferry",
    "the garden",
    "the school",
    "the forge",
    "the inn",
]
FILLERS = [
    "The wind came from the {way} and the {sky} was {state}.",
    "Nobody spoke for a while, and the fire burned {low}.",
    "It was a {state} {day}, and the road was {surface}.",
    "Somewhere a dog barked, and then it was {low} again.",
    "The {birds} flew over the {field} towards the {way}.",
    "They counted the {goods} and found that {number} were missing.",
    "Bread was {price} that week, and the {goods} were late.",
    "The river stood {low}, as it does in a {state} {season}.",
    "A cart full of {goods} stopped before the gate.",
    "In the {season} the {field} smelt of rain.",
]
WORDS = {
    "way": ["north", "south", "east", "west"],
    "sky": ["sky", "sea", "lake", "valley"],
    "state": ["grey", "clear", "cold", "mild", "bright", "dull"],
    "low": ["low", "quiet", "slow", "still"],
    "day": ["morning", "evening", "afternoon", "night"],
    "surface": ["wet", "dry", "empty", "white", "crowded"],
    "birds": ["crows", "geese", "gulls", "swallows"],
    "field": ["field", "meadow", "hill", "marsh"],
    "goods": ["apples", "barrels", "letters", "nets", "stones", "sacks"],
    "number": ["two", "three", "four", "five", "six", "seven"],
    "price": ["dear", "cheap", "scarce"],
    "season": ["spring", "summer", "autumn", "winter"],
}
FACTS = {"trade": TRADES, "thing": THINGS, "place": PLACES}
TOLD = {
    "trade": "{name} was known as the {value}.",
    "thing": "{name} always carried {value}.",
    "place": "{name} slept near {value}.",
}
AGAIN = {
    "trade": "It was {name}, the {value}.",
    "thing": "{name} still carried {value}.",
    "place": "{name} went home to {value}.",
}
RETELL_PROBABILITY = 0.5  # probability that a fact told at least twice is told once more; the mean is three tellings
MIN_WORDS_BETWEEN, MAX_WORDS_BETWEEN = 32, 8192  # words between tellings of a fact, log-uniform


@dataclass(frozen=True)
class Telling:
    """Statement of a fact, with its place in the text."""

    start: int  # character index of the fact's words in the text
    end: int  # character index after the fact's words
    words_back: int | None  # words since the previous telling; None for the first
    choices: int  # number of values that the fact was drawn from; a first telling costs the logarithm of `choices`


class Prose:
    """An endless generator of sentences."""

    def __init__(self, seed: int, retold: float = 0.35, new: float = 0.15) -> None:
        """Seed the generator.

        Args:
            retold: share of sentences that repeat a fact, while facts are due.
            new: share of sentences that tell a new fact.
        """
        self._draw = random.Random(f"prose/{seed}")
        self._retold, self._new = retold, new
        self._due: list[tuple[int, int, str, str, str, int]] = []  # word, number, name, kind, value, word of the last telling
        self._characters = self._words = self._facts = self._sentences = 0
        self.tellings: list[Telling] = []

    def sentences(self) -> Iterator[str]:
        """Yield the next sentences, each with the white space after it. Their facts are added to `tellings`."""
        while True:
            chance = self._draw.random()
            if self._due and self._due[0][0] <= self._words and chance < self._retold:
                text = self._again()
            elif chance > 1 - self._new:
                text = self._first()
            else:
                text = self._filler()
            self._sentences += 1
            text += "\n\n" if self._draw.random() < 0.1 else " "
            self._characters += len(text)
            self._words += len(text.split())
            yield text

    def text(self, characters: int) -> str:
        """Return the next whole sentences, with at least `characters` characters in total."""
        parts, length = [], 0
        for sentence in self.sentences():
            parts.append(sentence)
            length += len(sentence)
            if length >= characters:
                break
        return "".join(parts)

    def _filler(self) -> str:
        return self._draw.choice(FILLERS).format(**{key: self._draw.choice(words) for key, words in WORDS.items()})

    def _name(self) -> str:
        """Return a name of two invented words, one of about 30 million pairs."""
        parts = [[self._draw.choice(x) for x in (ONSETS, VOWELS, ENDINGS)] for _ in range(2)]
        return " ".join("".join(p).capitalize() for p in parts)

    def _first(self) -> str:
        kind = self._draw.choice(list(FACTS))
        name, value = self._name(), self._draw.choice(FACTS[kind])
        return self._tell(TOLD[kind], name, kind, value, None)

    def _again(self) -> str:
        _, _, name, kind, value, last = heapq.heappop(self._due)
        return self._tell(AGAIN[kind], name, kind, value, last)

    def _tell(self, form: str, name: str, kind: str, value: str, last: int | None) -> str:
        text = form.format(name=name, value=value)
        start = self._characters + text.rindex(value)
        word = self._words + len(text[: text.rindex(value)].split())
        self.tellings.append(Telling(start, start + len(value), None if last is None else word - last, len(FACTS[kind])))
        distance = round(math.exp(self._draw.uniform(math.log(MIN_WORDS_BETWEEN), math.log(MAX_WORDS_BETWEEN))))
        self._facts += 1
        if last is None or self._draw.random() < RETELL_PROBABILITY:
            heapq.heappush(self._due, (word + distance, self._facts, name, kind, value, word))
        return text


_MARGIN_CHARACTERS = 4096


def fact_costs(nll: NDArray[np.float32], byte_counts: NDArray[np.integer[Any]], seed: int) -> list[dict[str, Any]]:
    """Compute the mean cost of a fact's words by the distance from their last telling. The cost shows what a cache has forgotten.

    Args:
        nll: nats per token of the prose of this seed, NaN where not scored. [N].
        byte_counts: UTF-8 bytes per token. [N].
        seed: seed of the prose.

    Returns:
        A row for first tellings and a row per doubling of the distance: words_back [from, to) (None for first tellings),
        tellings, nats (summed over the tokens of the fact's words, mean over tellings), drawn_nats (mean log of the number of
        choices).
    """
    ends = np.cumsum(byte_counts)
    prose = Prose(seed)
    prose.text(int(ends[-1]) + _MARGIN_CHARACTERS)
    groups: dict[int | None, list[tuple[float, float]]] = defaultdict(list)
    for telling in prose.tellings:
        first = int(np.searchsorted(ends, telling.start, side="right"))  # token with the first byte of the fact's words
        last = int(np.searchsorted(ends, telling.end, side="left"))
        if last >= len(nll) or not np.isfinite(nll[first : last + 1]).all():
            continue
        doubling = None if telling.words_back is None else telling.words_back.bit_length()
        groups[doubling].append((float(nll[first : last + 1].sum(dtype=np.float64)), float(np.log(telling.choices))))
    rows = []
    for doubling in sorted(groups, key=lambda d: -1 if d is None else d):
        costs = np.array(groups[doubling])
        between = None if doubling is None else [2 ** (doubling - 1), 2**doubling]
        rows.append(
            {
                "words_back": between,
                "tellings": len(costs),
                "nats": float(costs[:, 0].mean()),
                "drawn_nats": float(costs[:, 1].mean()),
            }
        )
    return rows
