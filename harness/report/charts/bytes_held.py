"""Quality over the bytes held, whatever the format of K and V: a colour a policy, a shape a format, and the best of each size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.report import chart

_FORMATS = (
    "circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left", "arrow", "wedge",
    "stroke",
)  # fmt: skip
SIZE = {"width": 300, "height": 240}
_TICKS = [1 / 2**halvings for halvings in range(8)]
_MOST_LOST = 25  # % of perplexity; a cache that loses more is left out, and the axis says so


def over_bytes(equal: dict[str, Any], name: str) -> chart.Chart:
    """The chart. equal: an item of the feed's `equal_bytes`. name: of the file, without suffix."""
    alt = f"What each policy and format of {equal['model']}, {equal['subject']}, keeps of dense's quality, over the bytes held."
    return chart.Chart(name, alt, chart.make_visible(SIZE | panel(equal)), equal["suite"], equal["model"])


def panel(equal: dict[str, Any]) -> dict[str, Any]:
    """One panel, without its size."""
    of_text = equal["measure"] == "perplexity"
    values = [value for row in equal["rows"] if (value := _value(row, of_text, equal["dtype"])) is not None]
    values.sort(key=lambda v: (v["share"], v["y"] if of_text else -v["y"]))
    stored = list(dict.fromkeys(v["format"] for v in sorted(values, key=lambda v: v["order"])))
    title = f"perplexity lost to dense, % (up to {_MOST_LOST})" if of_text else "right answers, %"
    x = {
        "field": "share", "type": "quantitative", "title": "bytes of K and V, of dense's",
        "axis": {"values": _TICKS, "labelExpr": "datum.value == 1 ? '1' : '1/' + round(1 / datum.value)"},
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 12},
    }  # fmt: skip
    y = {"field": "y", "type": "quantitative", "title": title}
    shape = {
        "field": "format", "type": "nominal", "sort": None, "title": "K and V",
        "scale": {"domain": stored, "range": list(_FORMATS[: len(stored)])},
    }  # fmt: skip
    colour = {"field": "policy", "type": "nominal", "sort": None, "title": "policy", "legend": {"symbolType": "circle"}}
    point = {"type": "point", "filled": False, "size": 60, "strokeWidth": 1.8, "opacity": 0.9}
    line = {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "strokeWidth": 1.2, "color": "#808080"}
    return {
        "layer": [
            {"data": {"values": _front(values, of_text)}, "mark": line, "encoding": {"x": x, "y": y}},
            {"data": {"values": values}, "mark": point, "encoding": {"x": x, "y": y, "color": colour, "shape": shape}},
        ],
    }  # fmt: skip


def _value(row: dict[str, Any], of_text: bool, dtype: str) -> dict[str, Any] | None:
    """A point; None if the row has no share, or lost too much."""
    y = _lost(row) if of_text else 100 * row["answers"][0]["share"] if row["answers"] else None
    if y is None or not row["kv_share"] or (of_text and y > _MOST_LOST):
        return None
    order = [dtype, "int8", "int4", "kivi4", "int2", "kivi2"]
    stored = row["stored"] or dtype
    first = stored.split()[0]
    place = order.index(first) if first in order else len(order)
    return {"policy": row["policy"], "format": stored, "share": row["kv_share"], "y": y, "order": [place, stored]}


def _lost(row: dict[str, Any]) -> float | None:
    if row["loss"] is not None:
        lost: float = row["loss"]["value"]
        return lost
    return 0.0 if row["policy"] == "dense" and not row["stored"] else None


def _front(values: Sequence[dict[str, Any]], less_is_better: bool) -> list[dict[str, float]]:
    """The best quality that any cache of at most so many bytes has."""
    found: list[dict[str, float]] = []
    for value in values:
        if not found or ((value["y"] < found[-1]["y"]) == less_is_better and value["y"] != found[-1]["y"]):
            found.append({"share": value["share"], "y": value["y"]})
    return found
