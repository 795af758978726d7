"""Draws a sink that comes about by itself, and what losing it costs, from the `backcopy` suite's records: `make picture`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.chart import Chart, draw, write
from kvbench.harness.report.sections import KEPT
from kvbench.lab.attention.schema import AttentionMetrics

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "leaderboard" / "records"
TRAININGS = {"backcopy": "learned positions", "backcopy_rope": "RoPE"}
_ALT = "Attention to the first token, norm of its value, and the cost of losing it, over training steps on Bigram-Backcopy."


def measured(results: Path = RESULTS) -> list[tuple[str, int, Record]]:
    """(training, step, record) of the models that a training kept, in order of steps."""
    records, _ = RecordStore(results / "backcopy.jsonl").read_all()
    kept = [(KEPT.fullmatch(record.cell.model.id), record) for record in records if record.status == "ok"]
    found = [(name[1], int(name[2]), record) for name, record in kept if name]
    return sorted(found, key=lambda row: row[:2])


def first_token(record: Record) -> dict[str, float] | None:
    """Attention that the first token gets in the first layer, and the norm of its value over the others'; None of other tasks."""
    metrics = record.measured(AttentionMetrics)
    if metrics is None or not metrics.layers[0].value_norm:
        return None
    layer = metrics.layers[0]
    norms = layer.value_norm or [0.0, 1.0]
    return {"attention": layer.first, "value": norms[0] / norms[1], "sinks": metrics.sink_heads}


def late_nll(record: Record) -> float | None:
    """Nats a word over the last bucket of positions, in which every window has lost the first token; None of other tasks."""
    metrics = record.measured(NllMetrics)
    return None if metrics is None else metrics.buckets[-1].nll


def losses(rows: Sequence[tuple[str, int, Record]]) -> list[dict[str, Any]]:
    """What a window without the first token loses to one of its size with it, in % of perplexity."""
    nll = {(training, step, record.cell.policy, record.cell.capacity): late_nll(record) for training, step, record in rows}
    return [
        {"training": training, "step": step, "capacity": capacity, "loss": 100 * (math.exp(without - kept) - 1)}
        for (training, step, policy, capacity), without in nll.items()
        if policy == "window" and without is not None and (kept := nll.get((training, step, "sink_window", capacity))) is not None
    ]


def picture(rows: Sequence[tuple[str, int, Record]]) -> Chart:
    """A panel of the first token, and one of what losing it costs."""
    found = [(training, step, first_token(record)) for training, step, record in rows]
    shown = {"attention": "attention to it", "value": "norm of its value"}
    token = [
        {"step": step, "positions": TRAININGS[training], "figure": title, "value": figures[name]}
        for training, step, figures in found
        if figures is not None and training in TRAININGS and step
        for name, title in shown.items()
    ]
    lost = [
        {"step": row["step"], "positions": TRAININGS[row["training"]], "window": f"{row['capacity']}", "value": row["loss"]}
        for row in losses(rows)
        if row["training"] in TRAININGS and row["step"]
    ]
    dash = {"field": "positions", "type": "nominal", "title": "positions", "sort": list(TRAININGS.values())}
    scale = {"type": "log", "domain": [400, 20_000], "nice": False}
    step = {"field": "step", "type": "quantitative", "title": "training step", "scale": scale}
    line = {"type": "line", "strokeWidth": 2}

    def panel(title: str, values: list[dict[str, Any]], name: str, colour: dict[str, Any]) -> dict[str, Any]:
        return {
            "title": title,
            "width": 330,
            "height": 240,
            "data": {"values": values},
            "mark": line,
            "encoding": {
                "x": step,
                "y": {"field": "value", "type": "quantitative", "title": name},
                "color": colour,
                "strokeDash": dash,
            },
        }

    of_token = {"field": "figure", "type": "nominal", "title": "first token", "sort": list(shown.values())}
    of_window = {"field": "window", "type": "nominal", "title": "tokens cached", "sort": ["8", "32", "64"]}
    panels = [
        panel("the first token", token, "share, and times the others'", of_token),
        panel("a window that loses it", lost, "% of perplexity lost", of_window),
    ]
    return Chart("first-token-lost", _ALT, {"hconcat": panels, "resolve": {"scale": {"color": "independent"}}})


def drawings(results: Path = RESULTS) -> dict[str, str]:
    """The picture for a light and a dark page, by file name."""
    return draw([picture(measured(results))])


if __name__ == "__main__":
    write(drawings(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS), FOLDER)
