"""Perplexity over the stream: where the cache fills, where the training length ends, and what happens then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.records import Record
from harness.report import chart
from harness.report.markdown import told_apart
from harness.report.pairing import question

_FIRST = 64  # tokens of the first point
_PER_DOUBLING = 2  # points
_FEWEST = 24  # scored tokens of a point


def over_the_stream(records: Sequence[Record]) -> list[chart.Chart]:
    """A line a policy, a panel a capacity; none where records have no block sums."""
    having = [r for r in records if r.status == "ok" and r.metrics.get("blocks") and "stream_tokens" not in r.metrics]
    capacities = sorted({r.cell["capacity"] for r in having if r.cell["capacity"] is not None})
    if len(having) < 2 or not capacities:
        return []
    panels = [_panel([r for r in having if r.cell["capacity"] in (None, c)], c, len(capacities) > 1) for c in capacities]
    cell = having[0].cell
    model = cell["model"]["id"]
    return [
        chart.Chart(
            chart.name(f"{cell['suite']} {model}", question(having[0])),
            f"Perplexity of {model} over the stream, one line a policy, capacity {', '.join(map(str, capacities))}.",
            {"concat": panels, "columns": 2, "resolve": {"scale": {"color": "shared", "strokeDash": "shared"}}},
        )
    ]


def _panel(records: Sequence[Record], capacity: int, several: bool) -> dict[str, Any]:
    names = told_apart(records)
    values = [point | {"policy": n} for r, n in zip(records, names, strict=True) for point in _points(r)]
    last = max(v["token"] for v in values)
    length = next((r.facts.get("training_length") for r in records if r.facts.get("training_length")), None)
    marks = [{"at": capacity, "what": "cache full"}]
    marks += [{"at": length, "what": "training length"}] if length is not None and length < last else []
    return {
        **({"title": f"capacity {capacity:,}"} if several else {}),
        "width": 380 if several else 560, "height": 280, "layer": [*_marks(marks), _lines(values, last)],
    }  # fmt: skip


def _marks(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at, data = {"field": "at", "type": "quantitative"}, {"values": marks}
    words = {"type": "text", "align": "right", "baseline": "bottom", "angle": 270, "dy": -3, "y": 4}
    return [
        {"data": data, "mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.7}, "encoding": {"x": at}},
        {"data": data, "mark": words, "encoding": {"x": at, "text": {"field": "what"}}},
    ]


def _lines(values: list[dict[str, Any]], last: float) -> dict[str, Any]:
    policy = {"field": "policy", "type": "nominal", "sort": None, "title": "policy"}
    dashes = [dash for dash in ([1, 0], [6, 2], [2, 2]) for _ in range(chart.COLOURS)]  # where colours come round again
    powers = [2**i for i in range(5, 40) if 2**i <= last]
    return {
        "data": {"values": values}, "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": {
                "field": "token", "type": "quantitative", "title": "token of the stream",
                "scale": {"type": "log", "base": 2, "nice": False}, "axis": {"format": ",d", "values": powers},
            },
            "y": {
                "field": "perplexity", "type": "quantitative", "title": "perplexity",
                "scale": {"type": "log", "nice": False}, "axis": {"format": ",~g", "tickCount": 6},
            },
            "color": policy,
            "strokeDash": {**policy, "scale": {"range": dashes}},
        },
    }  # fmt: skip


def _points(record: Record) -> list[dict[str, float]]:
    """Perplexity between ever later tokens: `_PER_DOUBLING` points for every doubling of the stream, where enough was scored."""
    blocks = record.metrics["blocks"]
    sums, tokens, size = np.array(blocks["nll_sum"]), np.array(blocks["tokens"]), blocks["size"]
    points, low, edge = [], 0, float(_FIRST)
    while low < len(sums):
        high = min(len(sums), max(low + 1, round(edge / size)))
        edge *= 2 ** (1 / _PER_DOUBLING)
        if tokens[low:high].sum() >= _FEWEST:
            nll = float(sums[low:high].sum() / tokens[low:high].sum())
            middle = math.sqrt(max(low * size, size / 2) * high * size)
            points.append({"token": round(middle, 1), "perplexity": float(f"{math.exp(min(nll, 700)):.5g}")})
            low = high
        elif high == len(sums):  # a rest that is too short to be a point
            break
    return points
