"""Draws SmolLM2 under merging against dropping the same tokens, and under selection against full attention: `make picture`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import tables
import zoo

from kvbench.harness.report.chart import Chart, draw, write

FOLDER = Path(__file__).parent
_MERGING = "Perplexity of merging evicted tokens against dropping them, a row per policy, a panel for each moment of eviction."
_SELECTING = (
    "Perplexity lost to full attention by policies that select what a query reads, and by policies that evict, a row each."
)


def merging() -> Chart:
    """Return a panel per moment of eviction that has records."""
    panels = [
        zoo.panel(drawn, f"SmolLM2, evicted {when}", "dropping the same tokens")
        for moment, when in zoo.MOMENTS.items()
        if (drawn := _merging_rows(f"smollm2-{moment}"))
    ]
    return Chart("merging", _MERGING, {"hconcat": panels})


def _merging_rows(suite: str) -> list[zoo.Row]:
    """Return every merging policy of a suite, compared with the policy that drops the same tokens."""
    drawn = []
    for mode in ("stream", "cache"):
        for pair in tables.merging_pairs(suite, mode):
            drawn.append(zoo.Row.of(f"{pair.policy} of {pair.chooses}, {pair.capacity}", tables.against_dropped(pair)))
    return zoo.judged(drawn)


def selecting() -> Chart:
    """Return a row per policy."""
    rows = [zoo.Row.of(row.policy.replace("`", ""), row.lost) for row in tables.selecting()]
    return Chart("selecting", _SELECTING, {"hconcat": [zoo.panel(zoo.judged(rows), "SmolLM2 on a book", "full attention")]})


if __name__ == "__main__":
    write(draw([merging(), selecting()]), FOLDER)
