"""Memory: what is reported beside what was found, and the curve over the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.markdown import asked, count, in_bytes, label, md, status, table

AXES: tuple[str, ...] = ()
_COLUMNS = 9  # points of the curve that are shown


def headline(record: Record) -> str:
    """The peak."""
    return f"peak {in_bytes(record.metrics['peak_bytes'])} over weights"


def body(records: Sequence[Record]) -> list[str]:
    """The bytes, then the curve."""
    having = [r for r in records if r.status == "ok"]
    how = "; ".join(dict.fromkeys(str(r.metrics["how"]) for r in having))
    about = (
        f"{asked(records[0])}K/V and state are what the cache reports, allocated is what was found; they must agree. "
        "The peak is over what there was with the model loaded, and contains the activations of a block. "
        f"Growth is how far the peak rose after the cache had filled. Measured with {md(how)}.\n"
    )
    rows = []
    for record in records:
        m, ok = record.metrics, record.status == "ok"
        names = ("kv_bytes", "state_bytes", "allocated_bytes", "peak_bytes", "growth_bytes", "weight_bytes")
        rows.append([
            label(record), count(record.cell["capacity"]), *(in_bytes(m[name]) if ok else "" for name in names), status(record),
        ])  # fmt: skip
    head = ["policy", "capacity", "K/V", "state", "allocated", "peak", "growth", "weights", "status"]
    return [about, *table(head, rows, "lrrrrrrrl"), *_curve(having)]


def _curve(records: Sequence[Record]) -> list[str]:
    """The peak over the stream, and how long a token took in each part."""
    if not records:
        return []
    points = [c["position"] for c in records[0].metrics["curve"]]
    shown = sorted({points[round(i * (len(points) - 1) / (_COLUMNS - 1))] for i in range(_COLUMNS)})
    lines = []
    for name in ("peak", "ms/token"):
        rows = []
        for record in records:
            at = {c["position"]: c for c in record.metrics["curve"]}
            rows.append([label(record), count(record.cell["capacity"]), *(_shown(at[p], name) if p in at else "" for p in shown)])
        head = ["policy", "capacity", *(f"{name} at {p:,}" for p in shown)]
        lines += table(head, rows, "lr" + "r" * len(shown))
    return ["Over the stream, the peak so far, and the time of a token in the part that ends there:\n", *lines]


def _shown(point: dict[str, Any], name: str) -> str:
    return in_bytes(point["peak_bytes"]) if name == "peak" else f"{point['token_ms']:.3g}"
