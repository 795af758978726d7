"""Draws what SmolLM2 loses to full attention if a query reads a part of its cache: `make picture`."""

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
_ALT = "Perplexity lost to full attention by policies that select what a query reads, and by policies that evict, a row each."


def picture() -> Chart:
    """A row per policy."""
    rows = []
    for row in tables.selecting():
        percent = (round(100 * math.expm1(x or 0.0), 3) for x in (row.lost.mean, row.lost.low, row.lost.high))
        rows.append(zoo.Row(row.policy.replace("`", ""), *percent, p=row.lost.p or 0.0, closed=0.0))
    return Chart("selecting", _ALT, {"hconcat": [zoo.panel(zoo.judged(rows), "SmolLM2 on a book", "full attention")]})


if __name__ == "__main__":
    write(draw([picture()]), FOLDER)
