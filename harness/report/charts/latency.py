"""Latency against capacity, beside dense and recomputing the window."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import log_axis
from kvbench.harness.report.markdown import short_titles
from kvbench.harness.report.pairing import question


def over_capacity(records: Sequence[Record], machine: str = "") -> list[chart.Chart]:
    """Milliseconds per token over the capacity, a line per policy, dense dashed; no chart with fewer than two capacities.

    Args:
        records: of one section, measured on one machine.
        machine: its name, if the section has several.
    """
    timed = [(r, m) for r in records if (m := r.measured(StepMetrics))]
    bounded = [r for r, _ in timed if r.cell.capacity is not None]
    if len({r.cell.capacity for r in bounded}) < 2:
        return []
    names = dict(zip(map(id, bounded), short_titles(bounded), strict=True))
    values = [
        {"policy": names[id(r)], "capacity": r.cell.capacity, "ms": float(f"{m.step_ms:.4g}")}
        for r, m in timed
        if r.cell.capacity is not None
    ]
    unbounded = [{"policy": r.cell.policy, "ms": float(f"{m.step_ms:.4g}")} for r, m in timed if r.cell.capacity is None]
    capacities = sorted({c for r in bounded if (c := r.cell.capacity) is not None})
    y = log_axis("ms", "ms per token", padding=12)
    encoding = {"x": log_axis("capacity", "capacity, tokens", base=2, padding=16, values=capacities), "y": y}
    dense = [r.cell.policy for r, _ in timed if r.cell.capacity is None]
    pairs = [*((names[id(r)], r.cell.policy) for r in bounded), *zip(dense, dense, strict=True)]
    channels = {c: chart.by_policy(c, pairs) for c in ("color", "strokeDash", "shape")}
    level = {"mark": {"type": "rule", "strokeDash": [6, 3], "strokeWidth": 2}, "data": {"values": unbounded}}
    line = {"mark": {"type": "line", "point": {"size": 60}, "strokeWidth": 2}, "data": {"values": values}}
    levels = [level | {"encoding": {"y": y, "color": channels["color"]}}] if unbounded else []
    spec = {"width": 560, "height": 260, "layer": [line | {"encoding": encoding | channels}, *levels]}
    where = f" on {machine}" if machine else ""
    alt = f"Milliseconds per token of {{model}} over the capacity{where}, one line per policy; dense is dashed."
    return [chart.Chart.from_record(records[0], "latency", question(records[0]) + machine, alt, spec)]
