"""Latency against capacity: what a larger cache costs a step, beside dense and beside running the window afresh."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import log_axis, policy
from kvbench.harness.report.markdown import short_titles
from kvbench.harness.report.pairing import question


def over_capacity(records: Sequence[Record], machine: str = "") -> list[chart.Chart]:
    """Milliseconds a token over the capacity, a line a policy, dense as a level; none with fewer than two capacities.

    Args:
        records: of one section, measured on one machine.
        machine: its name, where the section has several.
    """
    having = [(r, m) for r in records if (m := r.measured(StepMetrics))]
    bounded = [r for r, _ in having if r.cell.capacity is not None]
    if len({r.cell.capacity for r in bounded}) < 2:
        return []
    names = dict(zip(map(id, bounded), short_titles(bounded), strict=True))
    values = [
        {"policy": names[id(r)], "capacity": r.cell.capacity, "ms": float(f"{m.step_ms:.4g}")}
        for r, m in having
        if r.cell.capacity is not None
    ]
    whole = [{"policy": r.cell.policy, "ms": float(f"{m.step_ms:.4g}")} for r, m in having if r.cell.capacity is None]
    capacities = sorted({c for r in bounded if (c := r.cell.capacity) is not None})
    y = log_axis("ms", "ms a token", padding=12)
    place = {"x": log_axis("capacity", "capacity, tokens", base=2, padding=16, values=capacities), "y": y, "color": policy()}
    level = {"mark": {"type": "rule", "strokeDash": [6, 3], "strokeWidth": 2}, "data": {"values": whole}}
    line = {"mark": {"type": "line", "point": True, "strokeWidth": 2}, "data": {"values": values}}
    levels = [level | {"encoding": {"y": y, "color": policy()}}] if whole else []
    spec = {"width": 560, "height": 260, "layer": [line | {"encoding": place}, *levels]}
    where = f" on {machine}" if machine else ""
    alt = f"Milliseconds a token of {{model}} over the capacity{where}, one line a policy; dashed: dense."
    return [chart.Chart.from_record(records[0], "latency", question(records[0]) + machine, alt, spec)]
