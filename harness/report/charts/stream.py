"""Perplexity over the stream: where the cache fills, where the training length ends, and what happens then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import log_axis, marks, panels, policy
from kvbench.harness.report.common_tokens import scores_all
from kvbench.harness.report.markdown import short_titles

_FIRST = 64  # tokens of the first point
_PER_DOUBLING = 2  # points
_FEWEST = 24  # scored tokens of a point


def over_the_stream(records: Sequence[Record]) -> list[chart.Chart]:
    """A line a policy, a panel a capacity; none where records have no block sums.

    Every line is over all tokens: who scored only every `stride`-th is not drawn.
    """
    having = [r for r in records if (m := r.measured(NllMetrics)) and m.stream_tokens is None and scores_all(r)]
    return panels(having, "Perplexity over the stream of {model}, one line a policy", _panel) if len(having) > 1 else []


def _panel(records: Sequence[Record], capacity: int) -> dict[str, Any]:
    values: list[dict[str, Any]] = [
        point | {"policy": n} for r, n in zip(records, short_titles(records), strict=True) for point in _points(r)
    ]
    last = max(v["token"] for v in values)
    length = next((r.facts.training_length for r in records if r.facts.training_length), None)
    at = [{"at": capacity, "what": "cache full"}]
    at += [{"at": length, "what": "training length"}] if length is not None and length < last else []
    powers = [2**i for i in range(5, 40) if 2**i <= last]
    place = {"x": log_axis("token", "token of the stream", base=2, values=powers), "y": log_axis("perplexity", "perplexity")}
    lines = {
        "data": {"values": values}, "mark": {"type": "line", "strokeWidth": 2},
        "encoding": place | {"color": policy(), "strokeDash": policy(dashed=True)},
    }  # fmt: skip
    return {"layer": [*marks(at), lines]}


def _points(record: Record) -> list[dict[str, float]]:
    """Perplexity between ever later tokens: `_PER_DOUBLING` points for every doubling of the stream, where enough was scored."""
    metrics = record.measured(NllMetrics)
    assert metrics is not None
    sums, tokens, size = np.array(metrics.blocks.nll_sum), np.array(metrics.blocks.tokens), metrics.blocks.size
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
