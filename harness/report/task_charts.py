"""Charts of tasks: NLL over a stream, step times over the capacity, right answers by depth; and shared parts of charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerCounts, NllMetrics, StepMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.pairing import question, scores_all
from kvbench.harness.report.rows import short_titles

_FIRST_POINT_TOKENS = 64
_POINTS_PER_DOUBLING = 2
_MIN_SCORED_TOKENS = 24  # smallest number of scored tokens per point
_CELL = 26  # width in pixels of a cell in the map of depths
_TENTHS = [f"{10 * tenth} to {10 * tenth + 10} %" for tenth in range(10)]
Depths = Mapping[str, AnswerCounts]  # by tenth of the prompt, "0" to "9"


def over_the_stream(records: Sequence[Record]) -> list[chart.Chart]:
    """Return a chart of perplexity over the stream with a line per policy and a panel per capacity; none for a single line.

    Every line is over all tokens, so policies that scored only every `stride`-th token are left out.
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
    encoding = {
        "x": chart.log_axis("token", "token of the stream", base=2, format=",d", values=powers),
        "y": chart.log_axis("perplexity", "perplexity"),
    }
    return {"layer": [*marks(lines_at), policy_lines(values, encoding, pairs, ("color", "strokeDash"))]}


def _points(record: Record) -> list[dict[str, float]]:
    """Return the points of a line: `_POINTS_PER_DOUBLING` per doubling of the stream, each over enough scored tokens."""
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
            points.append({"token": round(middle, 1), "perplexity": float(f"{perplexity(nll):.5g}")})
            low = high
        elif high == len(sums):  # the rest is too short for a point
            break
    return points


def over_capacity(records: Sequence[Record], machine: str = "") -> list[chart.Chart]:
    """Return a chart of milliseconds per token over the capacity, with a line per policy; none for a single capacity.

    The records are of one machine. machine: its name, if the section has several.
    """
    timed = [(r, float(f"{m.step_ms:.4g}")) for r in records if (m := r.measured(StepMetrics))]
    bounded = [(r, ms) for r, ms in timed if r.cell.capacity is not None]
    capacities = sorted({r.cell.capacity or 0 for r, _ in bounded})
    if len(capacities) < 2:
        return []
    names = short_titles([r for r, _ in bounded])
    values = [{"policy": n, "capacity": r.cell.capacity, "ms": ms} for n, (r, ms) in zip(names, bounded, strict=True)]
    unbounded = [{"policy": r.cell.policy, "ms": ms} for r, ms in timed if r.cell.capacity is None]
    y = chart.log_axis("ms", "ms per token", padding=12)
    encoding = {"x": chart.log_axis("capacity", "capacity, tokens", base=2, padding=16, format=",d", values=capacities), "y": y}
    pairs = [(name, r.cell.policy) for name, (r, _) in zip(names, bounded, strict=True)]
    pairs += [(r.cell.policy, r.cell.policy) for r, _ in timed if r.cell.capacity is None]
    level = {"mark": {"type": "rule", "strokeDash": [6, 3], "strokeWidth": 2}, "data": {"values": unbounded}}
    levels = [level | {"encoding": {"y": y, "color": chart.by_policy("color", pairs)}}] if unbounded else []
    spec = {"width": 560, "height": 260, "layer": [policy_lines(values, encoding, pairs, point={"size": 60}), *levels]}
    machine_words = f" on {machine}" if machine else ""
    alt = f"Milliseconds per token of {{model}} over the capacity{machine_words}, one line per policy; dense is dashed."
    return [chart.Chart.from_record(records[0], "latency", question(records[0]) + machine, alt, spec)]


def over_depths(by_task: Mapping[str, Mapping[str, Depths]], record: Record) -> chart.Chart:
    """Return a heat map with a panel per task, a column per policy and a row per tenth of the prompt.

    The lightest shade stands for 100 % right answers.

    Source: Liu et al. 2023, "Lost in the Middle", arXiv:2307.03172, for the question.

    by_task: counts of each policy, by task and by the policy's name with its capacity. record: any of the counted records.
    """
    panels = [_depth_panel(task, policies) for task, policies in by_task.items()]
    alt = f"Right answers of {{model}} by depth of what is asked for and by policy: {', '.join(by_task)}."
    spec = panels[0] if len(panels) == 1 else {"vconcat": panels}
    return chart.Chart.from_record(record, "depth", question(record) + "depth", alt, spec)


def _depth_panel(task: str, policies: Mapping[str, Depths]) -> dict[str, Any]:
    values = [
        {"policy": name, "depth": _TENTHS[int(tenth)], "right": round(100 * counts.right / counts.questions, 1)}
        for name, depths in policies.items()
        for tenth, counts in depths.items()
    ]
    names = chart.channel("policy", None, "nominal", sort=None, axis={"labelAngle": -45, "labelLimit": 260})
    depth = chart.channel("depth", "depth in the prompt", "ordinal", scale={"domain": _TENTHS})
    right = chart.channel("right", "right, %", scale={"domain": [0, 100], "scheme": "viridis"})
    return {"title": task} | chart.heat_map(values, {"step": _CELL}, {"step": _CELL // 2}, x=names, y=depth, color=right)


_SHARED = {"resolve": {"scale": {"color": "shared", "strokeDash": "shared"}}}


def panels(
    records: Sequence[Record], alt: str, panel: Callable[[Sequence[Record], int], dict[str, Any]], only: str = ""
) -> list[chart.Chart]:
    """Return a chart with a panel per capacity, each with the unbounded policies; none without a bounded cache.

    Args:
        alt: description of the chart; `{model}` is replaced by the model's id.
        panel: returns the specification of a panel, without its size, from its records and capacity.
        only: description of the selected records, if the section has several charts.
    """
    capacities = sorted({c for r in records if (c := r.cell.capacity) is not None})
    if not capacities:
        return []
    several = len(capacities) > 1
    size = {"width": 380 if several else 560, "height": 280}
    specs = [
        ({"title": f"capacity {c:,}"} if several else {}) | size | panel([r for r in records if r.cell.capacity in (None, c)], c)
        for c in capacities
    ]
    spec = specs[0]
    if several:
        spec = _together("vconcat", [_together("hconcat", specs[i : i + 2]) for i in range(0, len(specs), 2)])
    alt = f"{alt}{only and ', '}{only}, capacity {', '.join(map(str, capacities))}."
    return [chart.Chart.from_record(records[0], records[0].cell.task.name, question(records[0]) + only, alt, spec)]


def _together(how: str, specs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {how: list(specs)} | _SHARED


def policy_lines(
    values: Sequence[dict[str, Any]],
    encoding: dict[str, Any],
    pairs: Sequence[tuple[str, str]],
    kinds: Sequence[str] = ("color", "strokeDash", "shape"),
    **line: Any,
) -> dict[str, Any]:
    """Return a layer with a line per policy.

    Args:
        encoding: channels of both axes.
        pairs: (name in the chart, policy) of each line.
        kinds: channels that distinguish policies.
    """
    mark, channels = {"type": "line", "strokeWidth": 2}, {kind: chart.by_policy(kind, pairs) for kind in kinds}
    return {"data": {"values": list(values)}, "mark": mark | line, "encoding": encoding | channels}


def marks(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return layers of labelled, dashed vertical lines. lines: {"at": x, "what": label} of each line."""
    if not lines:
        return []
    x, data = {"field": "at", "type": "quantitative"}, {"values": list(lines)}
    words = {"type": "text", "align": "right", "baseline": "bottom", "angle": 270, "dy": -3, "y": 4}
    return [
        {"data": data, "mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.7}, "encoding": {"x": x}},
        {"data": data, "mark": words, "encoding": {"x": x, "text": {"field": "what"}}},
    ]
