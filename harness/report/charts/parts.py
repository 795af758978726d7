"""What charts have in common: a panel a capacity, a colour a policy, marks at a place of the x axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report import chart
from kvbench.harness.report.pairing import question

_SHARED = {"resolve": {"scale": {"color": "shared", "strokeDash": "shared"}}}


def panels(records: Sequence[Record], alt: str, panel: Callable[[Sequence[Record], int], dict[str, Any]]) -> list[chart.Chart]:
    """A chart with a panel for every capacity, each with the policies that have none; no chart without a bounded cache.

    Args:
        records: of one section.
        alt: what the picture shows; `{model}` stands for the model.
        panel: the specification of a panel, but for its size, from its records and its capacity.
    """
    capacities = sorted({c for r in records if (c := r.cell.capacity) is not None})
    if not capacities:
        return []
    several = len(capacities) > 1
    size = {"width": 380 if several else 560, "height": 280}
    drawn = [
        ({"title": f"capacity {c:,}"} if several else {}) | size | panel([r for r in records if r.cell.capacity in (None, c)], c)
        for c in capacities
    ]
    spec = drawn[0]
    if several:
        spec = _together("vconcat", [_together("hconcat", drawn[i : i + 2]) for i in range(0, len(drawn), 2)])
    alt = f"{alt}, capacity {', '.join(map(str, capacities))}."
    return [chart.Chart.from_record(records[0], records[0].cell.task.name, question(records[0]), alt, spec)]


def _together(how: str, drawn: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {how: list(drawn)} | _SHARED


def policy(dashed: bool = False) -> dict[str, Any]:
    """The channel that tells policies apart: by colour, and by dashes where colours come round again."""
    dashes = [dash for dash in ([1, 0], [6, 2], [2, 2]) for _ in range(chart.COLOURS)]
    channel = {"field": "policy", "type": "nominal", "sort": None, "title": "policy"}
    return channel | ({"scale": {"range": dashes}} if dashed else {})


def log_axis(
    field: str, title: str, *, base: int = 10, padding: int = 0, values: Sequence[float] | None = None
) -> dict[str, Any]:
    """A channel on a logarithmic axis.

    Args:
        field: of the data.
        title: of the axis, with its unit.
        base: of the logarithm.
        padding: pixels between the data and the frame.
        values: where the axis is marked; as the library chooses when None.
    """
    axis = {"format": ",~g", "tickCount": 6} if values is None else {"format": ",d", "values": list(values)}
    scale = {"type": "log", "base": base, "nice": False, "padding": padding}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def marks(at: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dashed lines across the panel, with words: layers of {"at": place, "what": words}."""
    if not at:
        return []
    place, data = {"field": "at", "type": "quantitative"}, {"values": list(at)}
    words = {"type": "text", "align": "right", "baseline": "bottom", "angle": 270, "dy": -3, "y": 4}
    return [
        {"data": data, "mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.7}, "encoding": {"x": place}},
        {"data": data, "mark": words, "encoding": {"x": place, "text": {"field": "what"}}},
    ]
