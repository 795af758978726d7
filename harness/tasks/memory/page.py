"""Memory: what is reported beside what was found, and the curve over the stream."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import count, in_bytes, label, md, status, table, task_line
from kvbench.harness.tasks.memory.schema import MemoryMetrics, Point

_COLUMNS = 9  # points of the curve that are shown


def body(records: Sequence[Record]) -> list[str | Chart]:
    """The bytes, then the curve."""
    having = [(r, m) for r in records if (m := r.measured(MemoryMetrics))]
    how = "; ".join(dict.fromkeys(m.how for _, m in having))
    about = (
        f"{task_line(records[0])}K/V and state are what the cache reports, allocated is what was found; they must agree. "
        "The peak is over what there was with the model loaded, and contains the activations of a block. "
        f"Growth is how far the peak rose after the cache had filled. Measured with {md(how)}.\n"
    )
    rows = []
    for record in records:
        m = record.measured(MemoryMetrics)
        sizes = [] if m is None else [
            m.kv_bytes, m.state_bytes, m.allocated_bytes, m.peak_bytes, m.growth_bytes, m.weight_bytes,
        ]  # fmt: skip
        rows.append([label(record), count(record.cell.capacity), *(map(in_bytes, sizes) if sizes else [""] * 6), status(record)])
    head = ["policy", "capacity", "K/V", "state", "allocated", "peak", "growth", "weights", "status"]
    return [about, *table(head, rows, "lrrrrrrrl"), *_curve(having)]


def _curve(having: Sequence[tuple[Record, MemoryMetrics]]) -> list[str]:
    """The peak over the stream, and how long a token took in each part."""
    if not having:
        return []
    points = [point.position for point in having[0][1].curve]
    shown = sorted({points[round(i * (len(points) - 1) / (_COLUMNS - 1))] for i in range(_COLUMNS)})
    lines = []
    for name in ("peak", "ms/token"):
        rows = []
        for record, metrics in having:
            at = {point.position: point for point in metrics.curve}
            rows.append([label(record), count(record.cell.capacity), *(_shown(at[p], name) if p in at else "" for p in shown)])
        head = ["policy", "capacity", *(f"{name} at {p:,}" for p in shown)]
        lines += table(head, rows, "lr" + "r" * len(shown))
    return ["Over the stream, the peak so far, and the time of a token in the part that ends there:\n", *lines]


def _shown(point: Point, name: str) -> str:
    return in_bytes(point.peak_bytes) if name == "peak" else f"{point.token_ms:.3g}"
