"""Draws what merging adds to dropping the same tokens, on SmolLM2: `make picture`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import tables
import zoo

from kvbench.harness.report.chart import Chart, draw, write

FOLDER = Path(__file__).parent
_ALT = "Perplexity of merging evicted tokens against dropping them, a row per policy, a panel for each moment of eviction."


def rows(suite: str) -> list[zoo.Row]:
    """Every merging policy of a suite beside the policy that drops the same tokens."""
    drawn = []
    for mode in ("stream", "cache"):
        for pair in tables.merging_pairs(suite, mode):
            added = tables.against_dropped(pair)
            percent = (round(100 * math.expm1(x or 0.0), 3) for x in (added.mean, added.low, added.high))
            drawn.append(zoo.Row(f"{pair.policy} of {pair.chooses}, {pair.capacity}", *percent, p=added.p or 0.0, closed=0.0))
    return zoo.judged(drawn)


def picture() -> Chart:
    """A panel per moment of eviction that has records."""
    panels = [
        zoo.panel(drawn, f"SmolLM2, evicted {when}", "dropping the same tokens")
        for moment, when in zoo.MOMENTS.items()
        if (drawn := rows(f"smollm2-{moment}"))
    ]
    return Chart("merging", _ALT, {"hconcat": panels})


if __name__ == "__main__":
    write(draw([picture()]), FOLDER)
