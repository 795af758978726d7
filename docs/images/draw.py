"""Draws the perplexity that SmolLM2 loses over budgets: `make picture`."""

from __future__ import annotations

import sys
from pathlib import Path

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.report.chart import draw, write
from kvbench.harness.report.feed import feed
from kvbench.harness.report.loss_charts import over_budgets

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
POLICIES = ("dense", "h2o", "random", "sink_window")


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """Return the picture for a light and a dark page, by file name."""
    records = [record for record in RecordStore(results / "smollm2_step.jsonl").read_all()[0] if _is_shown(record)]
    (question,) = (question for question in feed(records)["questions"] if question["measure"] == "perplexity")
    picture = over_budgets(question, "smollm2-budgets")
    return draw([picture] if picture is not None else [])


def _is_shown(record: Record) -> bool:
    """Return whether a record is of a shown policy: the paper's four sinks, one seed of the control, `cache` positions."""
    cell = record.cell
    is_default = cell.positions == "cache" and cell.seed == 0 and cell.parameters.get("sinks", 4) == 4
    return is_default and cell.policy in POLICIES


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
