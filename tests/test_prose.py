"""Generated prose: the same for a seed, with facts where it says they are, and the cost of forgetting one."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest

from kvbench.harness.data.prose import FACTS, MAX_WORDS_BETWEEN, MIN_WORDS_BETWEEN, Prose, fact_costs


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
    """The name before a value belongs to an earlier telling with the same value, `words_back` words before."""
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
    assert min(back) >= MIN_WORDS_BETWEEN
    assert sorted(back)[int(0.99 * len(back))] <= 1.1 * MAX_WORDS_BETWEEN
    assert all(doublings[i] > 0.04 * len(back) for i in range(6, 13))
    assert 0.4 < len(back) / len(prose.tellings) < 0.8


def test_what_a_fact_costs_is_counted_by_how_far_back_it_was_told():
    """For a reader who forgets after 300 words, a fact repeated earlier costs nothing, and later the log of its choices."""
    prose = Prose(7)
    text = prose.text(400_000)
    nll = np.full(len(text), 0.01, np.float32)  # one token per byte
    nll[0] = np.nan
    for telling in prose.tellings:
        forgotten = telling.words_back is None or telling.words_back > 256
        nll[telling.start : telling.end] = math.log(16) / (telling.end - telling.start) if forgotten else 0
    rows = fact_costs(nll, np.ones(len(text), np.int64), 7)
    assert [r["words_back"] for r in rows][:2] == [None, [32, 64]]
    assert sum(r["tellings"] for r in rows) > 2000
    for row in rows:
        expected = 0 if row["words_back"] and row["words_back"][1] <= 256 else math.log(16)
        assert row["nats"] == pytest.approx(expected, abs=1e-3)
        assert row["drawn_nats"] == pytest.approx(math.log(16))
