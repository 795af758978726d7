"""Generated prose: the same for a seed, its facts where it says they are, and what forgetting one costs."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from harness.data.prose import FACTS, FARTHEST, NEAREST, Prose


@pytest.fixture(scope="module")
def made():
    prose = Prose(0)
    return prose, prose.text(1_000_000)


def test_the_same_seed_gives_the_same_text_however_it_is_asked_for():
    prose = Prose(3)
    pieces = "".join(prose.text(500) for _ in range(40))
    assert Prose(3).text(len(pieces) - 1) == pieces
    assert Prose(4).text(1000)[:200] != pieces[:200]


def test_tellings_are_where_they_say(made):
    prose, text = made
    words = {w for values in FACTS.values() for w in values}
    assert len(prose.tellings) > 5000
    assert all(text[t.start : t.end] in words for t in prose.tellings if t.end <= len(text))


def test_a_fact_told_again_is_the_one_told_before(made):
    """The name before a value is that of an earlier telling, with the same value, so many words back."""
    prose, text = made
    word_at = {found.start(): number for number, found in enumerate(re.finditer(r"\S+", text))}
    last: dict[tuple[str, str], int] = {}
    told = 0
    for telling in prose.tellings[:3000]:
        sentence = text[max(text.rfind(end, 0, telling.start) for end in (". ", ".\n")) + 1 : telling.end]
        value = text[telling.start : telling.end]
        name = " ".join(w.strip(",") for w in sentence.split() if w[0].isupper() and w != "It")
        if telling.words_back is None:
            last[name, value] = word_at[telling.start]
        elif (name, value) in last:
            told += 1
            assert word_at[telling.start] - last[name, value] == telling.words_back
            last[name, value] = word_at[telling.start]
    assert told > 1500


def test_distances_reach_from_the_nearest_to_the_farthest(made):
    prose, _ = made
    back = [t.words_back for t in prose.tellings if t.words_back is not None]
    doublings = Counter(int(math.log2(x)) for x in back)
    assert min(back) >= NEAREST
    assert sorted(back)[int(0.99 * len(back))] <= 1.1 * FARTHEST
    assert all(doublings[i] > 0.04 * len(back) for i in range(6, 13))
    assert 0.4 < len(back) / len(prose.tellings) < 0.8
