"""Draws perplexity lost over budgets, of SmolLM2 and of a built-in model: `make picture`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.records import RecordStore
from kvbench.harness.report.chart import draw, write
from kvbench.harness.report.feed import feed
from kvbench.harness.report.loss_charts import over_budgets

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
PICTURES = {  # file: folder of records, and the policies that it shows; None: all
    "quality-against-bytes": ("budget", None),
    "smollm2-budgets": ("smollm2_step", ("dense", "h2o", "random", "sink_window")),
}


def question(suite: str, policies: Sequence[str] | None = None, results: Path = RESULTS) -> dict[str, Any]:
    """Return the feed's question about a suite's text at `cache` positions: what each policy loses at each budget."""
    records = [r for r in RecordStore(results / f"{suite}.jsonl").read_all()[0] if r.cell.positions == "cache"]
    if policies is not None:  # the paper's four sinks, and one seed of the control
        chosen = [r for r in records if r.cell.policy in policies and r.cell.seed == 0]
        records = [r for r in chosen if r.cell.parameters.get("sinks", 4) == 4]
    asked = feed(records)["questions"]
    (of_text,) = (question for question in asked if question["measure"] == "perplexity")
    return of_text


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """Return each picture for a light and a dark page, by file name."""
    pictures = [over_budgets(question(*chosen, results), name) for name, chosen in PICTURES.items()]
    return draw([picture for picture in pictures if picture is not None])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
