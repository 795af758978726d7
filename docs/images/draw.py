"""Draws the README's picture from the records of the `budget` suite: `make picture`. A test draws it again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvbench.harness.records import RecordStore
from kvbench.harness.report.chart import draw, write
from kvbench.harness.report.feed import feed
from kvbench.harness.report.loss_charts import over_budgets

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "results"


def question(results: Path = RESULTS) -> dict[str, Any]:
    """The suite's question of the feed: what each policy loses at each budget."""
    records = [r for r in RecordStore(results / "budget").read_all()[0] if r.cell.positions == "cache"]  # an endless stream
    asked = feed(records)["questions"]
    (of_text,) = (question for question in asked if question["measure"] == "perplexity")
    return of_text


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    picture = over_budgets(question(results), "quality-against-bytes")
    assert picture is not None
    return draw([picture])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
