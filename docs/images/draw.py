"""Draws the README's picture from the records of the `budget` suite: `make picture`. A test draws it again."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.report.chart import Chart, draw, write
from kvbench.harness.report.charts.parts import policy as policy_colour
from kvbench.harness.report.pairing import paired

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "results"
SHOWN = ("window", "h2o", "sink_window")  # `random` loses so much that the others would share a line


def points(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What each policy loses at each capacity: the paired difference in NLL to the recomputed window, as % of perplexity."""
    yardstick = next(r for r in records if r.cell.policy == "recompute_sink_window")
    rows = []
    for record in records:
        difference = paired(record, yardstick)
        if record is yardstick or difference is None or difference.low is None or difference.high is None:
            continue
        loss, low, high = (round(100 * math.expm1(nats), 2) for nats in (difference.mean, difference.low, difference.high))
        where = {"policy": record.cell.policy, "capacity": record.cell.capacity, "kib": record.metrics.kv_bytes / 1024}
        rows.append({**where, "loss": loss, "low": low, "high": high})
    return sorted(rows, key=lambda row: ([*SHOWN, row["policy"]].index(row["policy"]), row["capacity"]))


def picture(rows: Sequence[dict[str, Any]]) -> Chart:
    """One line a policy: perplexity lost over bytes kept, with 95 % intervals."""
    shown = [row for row in rows if row["policy"] in SHOWN]
    ticks = {row["kib"]: [f"{row['kib']:.0f} KiB", f"{row['capacity']} tokens"] for row in shown}
    x = {
        "field": "kib", "type": "quantitative", "title": "kept",
        "axis": {"values": sorted(ticks), "labelExpr": f"({json.dumps({f'{k:g}': v for k, v in ticks.items()})})[datum.value]"},
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 24},
    }  # fmt: skip
    y = {"field": "loss", "type": "quantitative", "title": "perplexity lost, %"}
    layers = [
        {"data": {"values": [{"loss": 0}]}, "mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"y": y}},
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"mark": {"type": "line", "strokeWidth": 2.5, "point": {"size": 60}}, "encoding": {"y": y}},
    ]
    for layer in layers[1:]:
        layer["encoding"] |= {"x": x, "color": policy_colour()}
    alt = "Perplexity lost over bytes of K and V kept: one line each for window, h2o and sink_window; 0 is no loss."
    spec = {"width": 560, "height": 260, "data": {"values": shown}, "layer": layers}
    return Chart("quality-against-bytes", alt, spec)


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    return draw([picture(points([r for r in RecordStore(results / "budget").read_all()[0] if r.status == "ok"]))])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
