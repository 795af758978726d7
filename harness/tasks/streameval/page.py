"""The StreamEval page: accuracy by distance, and by how much of the line was in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.machines import row_label
from kvbench.harness.report.markdown import cache_bytes, count, table, task_line
from kvbench.harness.tasks.common.answers import about_intervals, percent_or_status
from kvbench.harness.tasks.streameval.chart import distance, line_tokens, over_distance


def body(records: Sequence[Record]) -> list[str | Chart]:
    """A row per policy, a column per distance: percent right with 95 % intervals; then by how much was in the cache."""
    distances = sorted({distance(r) for r in records})
    length = line_tokens(records[0])
    rows: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        name = (row_label(record, records), count(record.cell.capacity))
        rows.setdefault(name, {})[distance(record)] = record
    head = ["policy", "capacity", *(f"{d} lines back" for d in distances)]
    lines = [[*name, *(percent_or_status(row.get(d)) for d in distances)] for name, row in rows.items()]
    about = f"{task_line(records[0])}A line takes {length} tokens on average. Percent right with {about_intervals(records)}:\n"
    return [about, *table(head, lines, "lr" + "r" * len(distances)), *over_distance(records), *_by_cache(records)]


def _by_cache(records: Sequence[Record]) -> list[str]:
    """Accuracy by how much of the line was in the cache when the answer began."""
    parts = ("whole", "in part", "gone")
    rows: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for record in records:
        metrics = record.measured(AnswerMetrics)
        if metrics is None:
            continue
        name = (row_label(record, records), count(record.cell.capacity), cache_bytes(metrics.kv_bytes))
        row = rows.setdefault(name, {})
        for part, counts in metrics.in_cache.items():
            total = row.setdefault(part, [0, 0])
            total[0], total[1] = total[0] + counts.right, total[1] + counts.questions
    lines = [
        [*name, *(f"{100 * row[part][0] / row[part][1]:.1f} of {row[part][1]:,}" if part in row else "" for part in parts)]
        for name, row in rows.items()
    ]
    head = ["policy", "capacity", "K/V", "whole line in the cache", "in part", "gone"]
    about = "Over all distances, by how much of the line was in the cache when the answer began:\n"
    return [about, *table(head, lines, "lrrrrr")]
