"""The memory page: reported and allocated bytes, and the curve over the stream."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import count, in_bytes, label, md, status, table, task_line
from kvbench.harness.tasks.memory.schema import MemoryMetrics, Point

_SHOWN_POINTS = 9


def body(records: Sequence[Record]) -> list[str | Chart]:
    """The bytes, then the curve."""
    measured = [(r, m) for r in records if (m := r.measured(MemoryMetrics))]
    how = "; ".join(dict.fromkeys(m.how for _, m in measured))
    about = (
        f"{task_line(records[0])}K/V and state are the bytes that the cache reports; allocated is measured, and must agree. "
        "The peak is above the level with the model loaded, and includes the activations of a block. "
        f"Growth is the rise of the peak after the cache was full. Measured with {md(how)}.\n"
    )
    rows = []
    for record in records:
        m = record.measured(MemoryMetrics)
        sizes = [] if m is None else [
            m.kv_bytes, m.state_bytes, m.allocated_bytes, m.peak_bytes, m.growth_bytes, m.weight_bytes,
        ]  # fmt: skip
        rows.append([label(record), count(record.cell.capacity), *(map(in_bytes, sizes) if sizes else [""] * 6), status(record)])
    head = ["policy", "capacity", "K/V", "state", "allocated", "peak", "growth", "weights", "status"]
    return [about, *table(head, rows, "lrrrrrrrl"), *_curve(measured)]


def _curve(measured: Sequence[tuple[Record, MemoryMetrics]]) -> list[str]:
    """The peak over the stream, and the time per token in each part of it."""
    if not measured:
        return []
    points = [point.position for point in measured[0][1].curve]
    shown = sorted({points[round(i * (len(points) - 1) / (_SHOWN_POINTS - 1))] for i in range(_SHOWN_POINTS)})
    lines = []
    for name in ("peak", "ms/token"):
        rows = []
        for record, metrics in measured:
            curve = {point.position: point for point in metrics.curve}
            cells = (_point(curve[p], name) if p in curve else "" for p in shown)
            rows.append([label(record), count(record.cell.capacity), *cells])
        head = ["policy", "capacity", *(f"{name} at {p:,}" for p in shown)]
        lines += table(head, rows, "lr" + "r" * len(shown))
    return ["Peak so far, and mean time per token since the previous point, over the stream:\n", *lines]


def _point(point: Point, name: str) -> str:
    return in_bytes(point.peak_bytes) if name == "peak" else f"{point.token_ms:.3g}"
