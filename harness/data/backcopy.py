"""Bigram-Backcopy: an endless seeded text, the simplest on which attention sinks develop.

The word after a trigger repeats the word before it. After any other word, the next word is drawn from that word's own
distribution. A head that copies is needed only at triggers, and must have no effect elsewhere.

Source: Guo et al. 2024, arXiv:2410.13835, Section 2, and `BBM/data.py` of their code (GuoTianYu2000/Active-Dormant-Attention).
Differs: successors are drawn instead of counted in Shakespeare's characters; triggers are a tenth of the words that follow a
    word, instead of the most frequent characters; the first word of a text is uniform over all words except triggers.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from functools import cache

TRIGGERS, OTHERS = 3, 61
WORDS = (*(f"t{n}" for n in range(TRIGGERS)), *(f"w{n}" for n in range(OTHERS)))
_TRIGGERED = 0.1  # probability of a trigger after a word that is no trigger
_STEEPNESS = 20  # exponent of successors' shares: u ** 20 approximates a Dirichlet of concentration 1 / 20 on every machine


@cache
def successors() -> tuple[tuple[float, ...], ...]:
    """Return the probabilities of the successors of each word that is no trigger. [OTHERS, TRIGGERS + OTHERS]."""
    draw, rows = random.Random("backcopy"), []
    for _ in range(OTHERS):
        shares = [draw.random() ** _STEEPNESS for _ in range(OTHERS)]
        scale = (1 - _TRIGGERED) / sum(shares)
        rows.append((*(_TRIGGERED / TRIGGERS for _ in range(TRIGGERS)), *(scale * x for x in shares)))
    return tuple(rows)


@cache
def _cumulated() -> list[list[float]]:
    return [list(itertools.accumulate(row)) for row in successors()]


def words(draw: random.Random) -> Iterator[tuple[int, bool]]:
    """Yield endless pairs: index of a word in `WORDS`, and whether the word is a copy."""
    before, last = 0, TRIGGERS + int(draw.random() * OTHERS)
    yield last, False
    while True:
        copied = last < TRIGGERS  # never after another trigger
        row = _cumulated()[(before if copied else last) - TRIGGERS]
        new = before if copied else min(bisect.bisect_right(row, draw.random()), len(WORDS) - 1)
        before, last = last, new
        yield new, copied


def text(seed: int, count: int) -> str:
    """Return the first `count` words."""
    return " ".join(WORDS[word] for word, _ in itertools.islice(words(random.Random(f"backcopy/{seed}")), count))


def best_nll(text: Sequence[str]) -> float:
    """Return the lowest expected NLL of a text: mean nats per word over all words except the first. A copy costs nothing."""
    costs = [-sum(p * math.log(p) for p in row if p) for row in successors()]
    of_word = {word: costs[place - TRIGGERS] if place >= TRIGGERS else 0.0 for place, word in enumerate(WORDS)}
    return sum(of_word[word] for word in text[:-1]) / (len(text) - 1)
