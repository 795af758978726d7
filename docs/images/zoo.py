"""Draws who beats a random choice, from the records of the `zoo` suite: `make picture`. A test draws it again."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.report.chart import Chart, draw, write
from kvbench.harness.report.markdown import short_titles
from kvbench.harness.report.pairing import paired
from kvbench.harness.report.ranks import holm

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "results"
MOMENTS = {"step": "evicting at every step", "prompt": "evicting once, after the prompt"}
BETTER, ALIKE, WORSE = _VERDICTS = ("surely better", "not surely different", "surely worse")
_NAMED_BY_THE_PANEL = re.compile(r",? ?\(?evict \w+(?=\))|\(\)")
_COLOURS = ("#009e73", "#8c8c8c", "#d55e00")  # legible on light and dark pages
_ALT = (
    "Perplexity that each policy loses to a random choice beside sinks and newest tokens, a panel for every moment of eviction."
)


def measured(results: Path = RESULTS) -> list[Record]:
    """The perplexity records of bounded caches."""
    records, _ = RecordStore(results / "zoo").read_all()
    return [r for r in records if r.status == "ok" and r.cell.task.name == "perplexity" and r.cell.capacity is not None]


def losses(records: Sequence[Record], moment: str, yardstick: str = "random") -> list[dict[str, Any]]:
    """Perplexity lost to a yardstick, in % with 95 % intervals, least first. Verdicts are adjusted for all rows (Holm).

    Of two policies of the yardstick's name it is the one with a window.
    """
    of_moment = [r for r in records if r.cell.evict == moment]
    base = next(r for r in of_moment if r.cell.policy == yardstick and r.cell.parameters.get("window"))
    rows = []
    for title, record in zip(short_titles(of_moment), of_moment, strict=True):
        difference = paired(record, base)
        if difference is None or difference.low is None or difference.high is None:
            continue
        loss, low, high = (round(100 * math.expm1(nats), 3) for nats in (difference.mean, difference.low, difference.high))
        name = _NAMED_BY_THE_PANEL.sub("", title).replace("()", "").strip()
        rows.append({"policy": name, "loss": loss, "low": low, "high": high, "p": difference.p})
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["verdict"] = ALIKE if p >= 0.05 else BETTER if row["loss"] < 0 else WORSE
    return sorted(rows, key=lambda row: row["loss"])


def picture(records: Sequence[Record]) -> Chart:
    """A panel per moment of eviction, a row per policy."""
    panels = [_panel(losses(records, moment), title) for moment, title in MOMENTS.items()]
    return Chart("who-beats-random", _ALT, {"hconcat": panels})


def _panel(rows: Sequence[dict[str, Any]], title: str) -> dict[str, Any]:
    x = {
        "field": "loss", "type": "quantitative", "title": "perplexity against random, %",
        "scale": {"type": "symlog", "nice": False}, "axis": {"values": [-1, 0, 1, 3, 10, 30, 100, 300, 1000], "format": "+,d"},
    }  # fmt: skip
    y = {"field": "policy", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 220}}
    verdict = {
        "field": "verdict", "type": "nominal", "title": None, "legend": {"orient": "bottom"},
        "scale": {"domain": _VERDICTS, "range": _COLOURS},
    }  # fmt: skip
    shape = verdict | {"scale": {"domain": _VERDICTS, "range": ["circle", "square", "triangle-up"]}}
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": verdict}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": interval},
        {"mark": {"type": "point", "filled": True, "size": 50}, "encoding": {"x": x, "y": y, "color": verdict, "shape": shape}},
    ]
    return {"title": title, "width": 240, "height": 15 * len(rows), "data": {"values": list(rows)}, "layer": layers}


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    return draw([picture(measured(results))])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
