"""Latency against capacity: what a larger cache costs a step, beside dense and beside running the window afresh."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import log_axis, policy
from kvbench.harness.report.markdown import told_apart
from kvbench.harness.report.pairing import question


def over_capacity(records: Sequence[Record], machine: str = "") -> list[chart.Chart]:
    """Milliseconds a token over the capacity, a line a policy, dense as a level; none with fewer than two capacities.

    Args:
        records: of one section, measured on one machine.
        machine: its name, where the section has several.
    """
    having = [r for r in records if r.status == "ok" and "step_ms" in r.metrics]
    bounded = [r for r in having if r.cell["capacity"] is not None]
    if len({r.cell["capacity"] for r in bounded}) < 2:
        return []
    values = [
        {"policy": name, "capacity": r.cell["capacity"], "ms": float(f"{r.metrics['step_ms']:.4g}")}
        for name, r in zip(told_apart(bounded), bounded, strict=True)
    ]
    whole = [
        {"policy": str(r.cell["policy"]), "ms": float(f"{r.metrics['step_ms']:.4g}")}
        for r in having
        if r.cell["capacity"] is None
    ]
    capacities = sorted({v["capacity"] for v in values})
    y = log_axis("ms", "ms a token", padding=12)
    place = {"x": log_axis("capacity", "capacity, tokens", base=2, padding=16, values=capacities), "y": y, "color": policy()}
    level = {"mark": {"type": "rule", "strokeDash": [6, 3], "strokeWidth": 2}, "data": {"values": whole}}
    line = {"mark": {"type": "line", "point": True, "strokeWidth": 2}, "data": {"values": values}}
    levels = [level | {"encoding": {"y": y, "color": policy()}}] if whole else []
    spec = {"width": 560, "height": 260, "layer": [line | {"encoding": place}, *levels]}
    where = f" on {machine}" if machine else ""
    alt = f"Milliseconds a token of {{model}} over the capacity{where}, one line a policy; dashed: dense."
    return [chart.of(records[0], "latency", question(records[0]) + machine, alt, spec)]
