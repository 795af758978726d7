"""The StreamEval chart: share of right answers over the distance of the line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import marks, panels
from kvbench.harness.report.machines import on_device
from kvbench.harness.report.markdown import short_titles
from kvbench.harness.report.shares import answers
from kvbench.harness.tasks.common.answers import QuizFacts
from kvbench.harness.tasks.streameval.schema import StreamEvalOptions


def distance(record: Record) -> int:
    """Lines between a question and the line that it asks about."""
    return record.cell.task_options(StreamEvalOptions).distance


def line_tokens(record: Record) -> float | None:
    """Mean tokens per line."""
    return record.data.line_tokens if isinstance(record.data, QuizFacts) else None


def over_distance(records: Sequence[Record]) -> list[chart.Chart]:
    """A panel per capacity with a line per policy; none if there is only one distance."""
    measured = [r for r in records if r.measured(AnswerMetrics)]
    if len({distance(r) for r in measured}) < 2:
        return []
    return panels(
        measured, "Share of right answers of {model} over how many lines back the answer is, one line per policy", _panel
    )


def _panel(records: Sequence[Record], capacity: int) -> dict[str, Any]:
    values: list[dict[str, Any]] = []
    pairs = []
    for name, record in zip(short_titles(records), records, strict=True):
        found = answers([record])
        assert found is not None
        pairs.append((name + on_device(record, records), record.cell.policy))
        low, high = found.ends or (found.share, found.share)
        share = {"right": found.share, "low": low, "high": high}
        values.append(
            {
                "policy": pairs[-1][0],
                "lines back": distance(record),
                **{k: round(100 * v, 2) for k, v in share.items()},
            }
        )
    values.sort(key=lambda v: v["lines back"])
    line = line_tokens(records[0])
    reach = [{"at": round(capacity / line, 2), "what": "reach of the cache"}] if line else []
    back = {
        "field": "lines back", "type": "quantitative", "title": "lines back", "scale": {"type": "log", "base": 2},
        "axis": {"format": ",d", "values": sorted({v["lines back"] for v in values})},
    }  # fmt: skip
    right = {"field": "right", "type": "quantitative", "title": "percent right", "scale": {"domain": [0, 100]}}
    errors = {"x": back, "y": {**right, "field": "low"}, "y2": {"field": "high"}, "color": chart.by_policy("color", pairs)}
    channels = {c: chart.by_policy(c, pairs) for c in ("color", "strokeDash", "shape")}
    return {
        "layer": [
            *marks(reach),
            {"data": {"values": values}, "mark": {"type": "rule", "strokeWidth": 1}, "encoding": errors},
            {
                "data": {"values": values}, "mark": {"type": "line", "point": {"size": 50}, "strokeWidth": 2},
                "encoding": {"x": back, "y": right} | channels,
            },
        ]
    }  # fmt: skip
