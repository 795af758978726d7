"""Draws what SmolLM2 loses over budgets, and quality over bytes in every format of K and V: `make picture`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.report.chart import Chart, draw, write
from kvbench.harness.report.feed import feed
from kvbench.harness.report.loss_charts import over_budgets, panel

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
POLICIES = ("dense", "h2o", "random", "sink_window")  # over budgets
PANELS = {  # how a subject of the feed begins, and the panel's title
    "prose": ("generated prose", "next words of prose"),
    "stream": ("StreamEval", "a line 10 lines back (StreamEval)"),
    "seen": ("once", "a line, question seen before the cut"),
    "unseen": ("once, question unseen", "a line, question not seen"),
}
_SIZE = {"width": 300, "height": 220}
_ALT = "Quality over the bytes held, a colour a policy, a shape a format of K and V, a panel for each of four questions."


def by_budget(results: Path = RESULTS) -> Chart | None:
    """Return perplexity lost over budgets, from the records of `smollm2-step`."""
    records = [record for record in RecordStore(results / "smollm2_step.jsonl").read_all()[0] if _is_shown(record)]
    (question,) = (question for question in feed(records)["questions"] if question["measure"] == "perplexity")
    return over_budgets(question, "smollm2-budgets")


def _is_shown(record: Record) -> bool:
    """Return whether a record is of a shown policy: the paper's four sinks, one seed of the control, `cache` positions."""
    cell = record.cell
    is_default = cell.positions == "cache" and cell.seed == 0 and cell.parameters.get("sinks", 4) == 4
    return is_default and cell.policy in POLICIES


def by_bytes(results: Path = RESULTS) -> Chart:
    """Return quality over bytes, two rows of two panels, from the records of `equal-bytes`."""
    drawn = [{"title": PANELS[name][1]} | _SIZE | panel(item) for name, item in _equal_bytes(results).items()]
    return Chart("equal-bytes", _ALT, {"vconcat": [{"hconcat": drawn[:2]}, {"hconcat": drawn[2:]}]})


def _equal_bytes(results: Path) -> dict[str, dict[str, Any]]:
    """Return the feed's items of equal bytes, by panel."""
    items = feed(RecordStore(results / "equal_bytes.jsonl").read_all()[0])["equal_bytes"]
    found = {name: [item for item in items if item["subject"].startswith(start)] for name, (start, _) in PANELS.items()}
    return {name: min(those, key=lambda item: len(item["subject"])) for name, those in found.items()}  # "once" begins two


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    write(draw([chart for chart in (by_budget(folder), by_bytes(folder)) if chart is not None]), FOLDER)
