"""Common parts of charts: a panel per capacity, logarithmic axes, marks on the x axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report import chart
from kvbench.harness.report.pairing import question

_SHARED = {"resolve": {"scale": {"color": "shared", "strokeDash": "shared"}}}


def panels(records: Sequence[Record], alt: str, panel: Callable[[Sequence[Record], int], dict[str, Any]]) -> list[chart.Chart]:
    """A chart with a panel per capacity, each including the unbounded policies; no chart without a bounded cache.

    Args:
        records: of one section.
        alt: what the chart shows; `{model}` is replaced by the model's id.
        panel: makes the specification of a panel, without its size, from its records and capacity.
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
    alt = f"{alt}, capacity {', '.join(map(str, capacities))}."
    return [chart.Chart.from_record(records[0], records[0].cell.task.name, question(records[0]), alt, spec)]


def _together(how: str, specs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {how: list(specs)} | _SHARED


def log_axis(
    field: str, title: str, *, base: int = 10, padding: int = 0, values: Sequence[float] | None = None
) -> dict[str, Any]:
    """A channel on a logarithmic axis.

    Args:
        field: of the values.
        title: of the axis, with its unit.
        base: of the logarithm.
        padding: pixels between the data and the frame.
        values: ticks; chosen by Vega-Lite when None.
    """
    axis = {"format": ",~g", "tickCount": 6} if values is None else {"format": ",d", "values": list(values)}
    scale = {"type": "log", "base": base, "nice": False, "padding": padding}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def marks(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers of labelled, dashed vertical lines.

    Args:
        lines: {"at": x, "what": label} of each.
    """
    if not lines:
        return []
    x, data = {"field": "at", "type": "quantitative"}, {"values": list(lines)}
    words = {"type": "text", "align": "right", "baseline": "bottom", "angle": 270, "dy": -3, "y": 4}
    return [
        {"data": data, "mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.7}, "encoding": {"x": x}},
        {"data": data, "mark": words, "encoding": {"x": x, "text": {"field": "what"}}},
    ]
