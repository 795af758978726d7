"""Perplexity over the stream, with marks where the cache fills and where the training length ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import log_axis, marks, panels
from kvbench.harness.report.common_tokens import scores_all
from kvbench.harness.report.markdown import short_titles

_FIRST_POINT_TOKENS = 64
_POINTS_PER_DOUBLING = 2
_MIN_SCORED_TOKENS = 24  # of a point


def over_the_stream(records: Sequence[Record]) -> list[chart.Chart]:
    """A line per policy, a panel per capacity; no chart with fewer than two lines.

    Every line is over all tokens, so policies that scored only every `stride`-th are left out.
    """
    complete = [r for r in records if (m := r.measured(NllMetrics)) and m.stream_tokens is None and scores_all(r)]
    return panels(complete, "Perplexity over the stream of {model}, one line per policy", _panel) if len(complete) > 1 else []


def _panel(records: Sequence[Record], capacity: int) -> dict[str, Any]:
    names = short_titles(records)
    values: list[dict[str, Any]] = [point | {"policy": n} for r, n in zip(records, names, strict=True) for point in _points(r)]
    pairs = [(n, r.cell.policy) for r, n in zip(records, names, strict=True)]
    last = max(v["token"] for v in values)
    length = next((r.facts.training_length for r in records if r.facts.training_length), None)
    lines_at = [{"at": capacity, "what": "cache full"}]
    lines_at += [{"at": length, "what": "training length"}] if length is not None and length < last else []
    powers = [2**i for i in range(5, 40) if 2**i <= last]
    encoding = {"x": log_axis("token", "token of the stream", base=2, values=powers), "y": log_axis("perplexity", "perplexity")}
    lines = {
        "data": {"values": values}, "mark": {"type": "line", "strokeWidth": 2},
        "encoding": encoding | {c: chart.by_policy(c, pairs) for c in ("color", "strokeDash")},
    }  # fmt: skip
    return {"layer": [*marks(lines_at), lines]}


def _points(record: Record) -> list[dict[str, float]]:
    """Points of a line: `_POINTS_PER_DOUBLING` per doubling of the stream, each over enough scored tokens."""
    metrics = record.measured(NllMetrics)
    assert metrics is not None
    sums, tokens, size = np.array(metrics.blocks.nll_sum), np.array(metrics.blocks.tokens), metrics.blocks.size
    points, low, edge = [], 0, float(_FIRST_POINT_TOKENS)
    while low < len(sums):
        high = min(len(sums), max(low + 1, round(edge / size)))
        edge *= 2 ** (1 / _POINTS_PER_DOUBLING)
        if tokens[low:high].sum() >= _MIN_SCORED_TOKENS:
            nll = float(sums[low:high].sum() / tokens[low:high].sum())
            middle = math.sqrt(max(low * size, size / 2) * high * size)
            points.append({"token": round(middle, 1), "perplexity": float(f"{math.exp(min(nll, 700)):.5g}")})
            low = high
        elif high == len(sums):  # the rest is too short for a point
            break
    return points
