"""Charts of lost quality: at each budget of a question with intervals, and over the bytes held in any format of K and V."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

from kvbench.harness.core.grouped import grouped
from kvbench.harness.report import chart

_FORMATS = (*chart.SHAPES, "arrow", "wedge", "stroke")
_FAR = 8  # a policy is left out if its loss exceeds the next smaller one and the median by this factor
_NEAR_ZERO = 0.05
SIZE = {"width": 300, "height": 240}
_TICKS = [1 / 2**halvings for halvings in range(8)]
_MOST_LOST = 25  # % of perplexity; a cache that loses more is left out, and the title of the axis has the limit


def over_budgets(question: dict[str, Any], name: str) -> chart.Chart | None:
    """Draw a line per policy, or an interval per policy for a single budget. None if no policy has a loss with an interval.

    Policies with losses so large that the other lines would coincide are left out. A chart of lines also leaves out policies with
    at most half of the budgets. question: question of the feed. name: name of the file, without suffix.
    """
    rows = [
        row
        for budget in question["budgets"]
        for row in budget["rows"]
        if row["kind"] != "reference" and row["loss"] and row["loss"]["low"] is not None
    ]
    by_name = grouped(rows, lambda row: row["name"])
    few = max(1, len({row["capacity"] for row in rows}) // 2)
    measured = {name for name, of_name in by_name.items() if len({row["capacity"] for row in of_name}) > few} or by_name.keys()
    largest = {name: max(row["loss"]["value"] for row in by_name[name]) for name in measured}
    most = _typical(sorted(largest.values()))
    shown = [row for row in rows if largest.get(row["name"], math.inf) <= most]
    if not shown:
        return None
    sized = [row for row in shown if row["capacity"] is not None]  # other policies have no place on the axis
    shown = sized or shown
    unit = "perplexity lost to {}, %" if question["measure"] == "perplexity" else "points of right answers lost to {}"
    spec = _spec(shown, unit.format(shown[0]["loss"]["to_name"]))
    names = ", ".join(dict.fromkeys(row["name"] for row in shown))
    alt = f"What each policy loses of {question['model']}, {question['subject']}, at each budget: {names}. 0 is no loss."
    return chart.Chart(name, alt, chart.make_visible(spec))


def _typical(losses: list[float]) -> float:
    """Return the largest loss before a jump: a loss above `_FAR` times both the next smaller loss and the median."""
    for smaller, larger in itertools.pairwise(losses):
        if larger > _FAR * max(smaller, losses[len(losses) // 2], _NEAR_ZERO):
            return smaller
    return losses[-1] if losses else 0.0


def _spec(rows: list[dict[str, Any]], unit: str) -> dict[str, Any]:
    """Draw a line at 0, the interval of each loss, and the losses: over the budgets, or by policy if there is one budget."""
    values = [
        {
            "policy": row["name"],
            "capacity": row["capacity"],
            "loss": row["loss"]["value"],
            "low": row["loss"]["low"],
            "high": row["loss"]["high"],
            "share": None if row["kv_share"] is None else round(100 * row["kv_share"]),
        }
        for row in rows
    ]
    pairs, lost = [(row["name"], row["policy"]) for row in rows], chart.channel("loss", unit)
    if len({row["capacity"] for row in rows}) > 1:
        values.sort(key=lambda v: (v["policy"], v["capacity"]))
        axis, across = "y", {"x": _budgets(values)}
        size: dict[str, Any] = {"width": 560, "height": 260}
        mark: dict[str, Any] = {"type": "line", "strokeWidth": 2.5, "point": {"size": 60}}
        channels = {kind: chart.by_policy(kind, pairs) for kind in ("color", "strokeDash", "shape")}
    else:
        policy = chart.channel("policy", None, "nominal", sort=None, axis={"labelLimit": 260})
        axis, across = "x", {"y": policy}
        size = {"width": 420, "height": {"step": 18}}
        mark = {"type": "point", "filled": True, "size": 70, "opacity": 1}
        channels = {kind: {**chart.by_policy(kind, pairs), "legend": None} for kind in ("color", "shape")}
    ends = {axis: {**lost, "field": "low"}, f"{axis}2": {"field": "high"}}
    zero = {"data": {"values": [{"loss": 0}]}, "mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {axis: lost}}
    interval = {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": across | {"color": channels["color"]} | ends}
    losses = {"mark": mark, "encoding": across | {axis: lost} | channels}
    return size | {"data": {"values": values}, "layer": [zero, interval, losses]}


def _budgets(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the channel of the budget, labelled in tokens and in bytes of K and V relative to dense's."""
    ticks = {
        f"{v['capacity']:g}": [f"{v['capacity']} tokens", *([f"{v['share']} % of bytes"] if v["share"] else [])] for v in values
    }
    labels = f"({json.dumps(ticks)})[datum.value]"
    capacities = sorted({v["capacity"] for v in values})
    return chart.log_axis("capacity", "kept", base=2, padding=24, values=capacities, labelExpr=labels)


def over_bytes(equal: dict[str, Any], name: str) -> chart.Chart:
    """Draw points with a colour per policy and a shape per format, and a line through the best of each size.

    equal: item of the feed's `equal_bytes`. name: name of the file, without suffix.
    """
    alt = f"What each policy and format of {equal['model']}, {equal['subject']}, keeps of dense's quality, over the bytes held."
    return chart.Chart(name, alt, chart.make_visible(SIZE | panel(equal)))


def panel(equal: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a panel, without its size."""
    of_text = equal["measure"] == "perplexity"
    values = [value for row in equal["rows"] if (value := _value(row, of_text, equal["dtype"])) is not None]
    values.sort(key=lambda v: (v["share"], v["y"] if of_text else -v["y"]))
    stored = list(dict.fromkeys(v["format"] for v in sorted(values, key=lambda v: v["order"])))
    title = f"perplexity lost to dense, % (up to {_MOST_LOST})" if of_text else "right answers, %"
    labels = "datum.value == 1 ? '1' : '1/' + round(1 / datum.value)"
    x = chart.log_axis("share", "bytes of K and V, of dense's", base=2, padding=12, values=_TICKS, labelExpr=labels)
    y = chart.channel("y", title)
    formats = {"domain": stored, "range": list(_FORMATS[: len(stored)])}
    shape = chart.channel("format", "K and V", "nominal", sort=None, scale=formats)
    colour = chart.channel("policy", "policy", "nominal", sort=None, legend={"symbolType": "circle"})
    point = {"type": "point", "filled": False, "size": 60, "strokeWidth": 1.8, "opacity": 0.9}
    line = {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "strokeWidth": 1.2, "color": "#808080"}
    return {
        "layer": [
            {"data": {"values": _front(values, of_text)}, "mark": line, "encoding": {"x": x, "y": y}},
            {"data": {"values": values}, "mark": point, "encoding": {"x": x, "y": y, "color": colour, "shape": shape}},
        ],
    }


def _value(row: dict[str, Any], of_text: bool, dtype: str) -> dict[str, Any] | None:
    """Return a point; None if the row has no share of bytes, or loses more than `_MOST_LOST`."""
    if of_text:
        is_dense = row["policy"] == "dense" and not row["stored"]
        y = row["loss"]["value"] if row["loss"] is not None else 0.0 if is_dense else None
    else:
        y = 100 * row["answers"][0]["share"] if row["answers"] else None
    if y is None or not row["kv_share"] or (of_text and y > _MOST_LOST):
        return None
    order = [dtype, "int8", "int4", "kivi4", "int2", "kivi2"]
    stored = row["stored"] or dtype
    first = stored.split()[0]
    place = order.index(first) if first in order else len(order)
    return {"policy": row["policy"], "format": stored, "share": row["kv_share"], "y": y, "order": [place, stored]}


def _front(values: Sequence[dict[str, Any]], less_is_better: bool) -> list[dict[str, float]]:
    """Return the best quality of all caches of at most each size. values: points in order of size."""
    front: list[dict[str, float]] = []
    for value in values:
        if not front or ((value["y"] < front[-1]["y"]) == less_is_better and value["y"] != front[-1]["y"]):
            front.append({"share": value["share"], "y": value["y"]})
    return front
