"""ARC as a stream: accuracy with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.machines import row_label
from kvbench.harness.report.markdown import asked, cache_bytes, count, table
from kvbench.harness.report.sections.streameval import cell, headline

__all__ = ["AXES", "body", "headline"]
AXES = ("subset",)


def body(records: Sequence[Record]) -> list[str]:
    """Policies down, Easy and Challenge across, percent right with a 95 % Wilson interval."""
    subsets = sorted({r.cell["task"]["subset"] for r in records}, reverse=True)
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((row_label(record, records), count(record.cell["capacity"])), {})[record.cell["task"]["subset"]] = record
    lines = []
    for name, row in rows.items():
        any_of = next(iter(row.values()))
        figures = [cell(row.get(s)) for s in subsets]
        lines.append([*name, *figures, cache_bytes(any_of.metrics.get("kv_bytes"))])
    head = ["policy", "capacity", *subsets, "K/V"]
    return [f"{asked(records[0])}Percent right, 95 % Wilson intervals:\n", *table(head, lines, "lr" + "r" * len(subsets) + "r")]
