"""Draws quality over bytes in every format of K and V, from the records of `equal-bytes`: `make picture`. Tested."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvbench.harness.records import RecordStore
from kvbench.harness.report.chart import Chart, draw, write
from kvbench.harness.report.feed import feed
from kvbench.harness.report.loss_charts import panel

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
PANELS = {  # how a subject of the feed begins, and the panel's title
    "prose": ("generated prose", "next words of prose"),
    "stream": ("StreamEval", "a line 10 lines back (StreamEval)"),
    "seen": ("once", "a line, question seen before the cut"),
    "unseen": ("once, question unseen", "a line, question not seen"),
}
_SIZE = {"width": 300, "height": 220}
_ALT = "Quality over the bytes held, a colour a policy, a shape a format of K and V, a panel for each of four questions."


def measured(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The feed's items of equal bytes, by panel."""
    items = feed(RecordStore(results / "equal_bytes.jsonl").read_all()[0])["equal_bytes"]
    found = {name: [item for item in items if item["subject"].startswith(start)] for name, (start, _) in PANELS.items()}
    return {name: min(those, key=lambda item: len(item["subject"])) for name, those in found.items()}  # "once" begins two


def picture(items: dict[str, dict[str, Any]]) -> Chart:
    """Two rows of two panels."""
    drawn = [{"title": PANELS[name][1]} | _SIZE | panel(item) for name, item in items.items()]
    return Chart("equal-bytes", _ALT, {"vconcat": [{"hconcat": drawn[:2]}, {"hconcat": drawn[2:]}]})


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    return draw([picture(measured(results))])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
