"""Perplexity against the bytes of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import log_axis
from kvbench.harness.report.common_tokens import common_perplexity
from kvbench.harness.report.front import front
from kvbench.harness.report.markdown import title
from kvbench.harness.report.rows import Row, rows


def against_bytes(records: Sequence[Record], machine: str = "") -> list[chart.Chart]:
    """Perplexity against K/V bytes, a colour per policy, the front ringed; no chart if all bounded caches are equally large.

    Every point is over all tokens that these policies read. Policies without a cache, which may score fewer tokens, are left out.

    Args:
        records: of one suite and model, measured on one machine.
        machine: its name, if the page has several.
    """
    policies = rows(records)
    shown = [
        (row, on_front) for row, on_front in zip(policies, front(policies), strict=True) if row.nll is not None and row.kv_bytes
    ]
    scored = [row.perplexity for row, _ in shown if row.perplexity is not None]
    values = [_value(row, scored, on_front is True) for row, on_front in shown]
    if len({v["kib"] for v in values if v["capacity"] is not None}) < 2:
        return []
    cell = records[0].cell.as_json()
    encoding = {"x": log_axis("kib", "K/V, KiB", padding=16), "y": log_axis("perplexity", "perplexity on all tokens", padding=16)}
    pairs = [(v["policy"], v["policy"]) for v in values]
    encoding |= {c: chart.by_policy(c, pairs) for c in ("color", "shape")} | {"tooltip": {"field": "what"}}
    ringed = {k: v for k, v in encoding.items() if k != "shape"}
    ring = {"type": "point", "shape": "circle", "size": 190, "strokeWidth": 1.2, "filled": False}
    layers = [
        {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.9}, "encoding": encoding},
        {"transform": [{"filter": "datum.front"}], "mark": ring, "encoding": ringed},
    ]
    unique = repr([*(cell[k] for k in ("suite", "suite_version", "model")), *([machine] if machine else [])])
    where = f" on {machine}" if machine else ""
    alt = f"Perplexity of {{model}} against the bytes of its cache{where}, one colour per policy; the front is ringed."
    spec = {"width": 560, "height": 260, "data": {"values": values}, "layer": layers}
    return [chart.Chart.from_record(records[0], "bytes", unique, alt, spec)]


def _value(row: Row, rivals: Sequence[Record], on_front: bool) -> dict[str, Any]:
    """A point. rivals: the records of all points."""
    assert row.perplexity is not None
    capacity, perplexity = row.cell.capacity, common_perplexity(row.perplexity, rivals)
    where = "" if capacity is None else f" at {capacity}"
    return {
        "policy": row.cell.policy, "capacity": capacity, "what": f"{title(row.records[0])}{where}",
        "kib": round((row.kv_bytes or 0) / 1024, 2), "perplexity": float(f"{perplexity:.5g}"),
        "front": on_front,
    }  # fmt: skip
