"""StreamEval: how many questions are answered rightly, over how far back their line is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.core.intervals import wilson
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report import chart
from kvbench.harness.report.charts.parts import marks, panels, policy
from kvbench.harness.report.machines import on_device
from kvbench.harness.report.markdown import short_titles
from kvbench.harness.tasks.common.answers import QuizFacts
from kvbench.harness.tasks.streameval.schema import StreamEvalOptions


def distance(record: Record) -> int:
    """Lines since what was asked for."""
    return record.cell.task_options(StreamEvalOptions).distance


def line_tokens(record: Record) -> float | None:
    """Mean tokens of a line."""
    return record.data.line_tokens if isinstance(record.data, QuizFacts) else None


def over_distance(records: Sequence[Record]) -> list[chart.Chart]:
    """A line a policy with its intervals, a panel a capacity; none where only one distance was asked for."""
    having = [r for r in records if r.measured(AnswerMetrics)]
    if len({distance(r) for r in having}) < 2:
        return []
    return panels(having, "Answers right over the lines since what was asked for, of {model}, one line a policy", _panel)


def _panel(records: Sequence[Record], capacity: int) -> dict[str, Any]:
    values: list[dict[str, Any]] = []
    for name, record in zip(short_titles(records), records, strict=True):
        metrics = record.measured(AnswerMetrics)
        assert metrics is not None
        low, high = wilson(metrics.right, metrics.questions)
        share = {"right": metrics.right / metrics.questions, "low": low, "high": high}
        values.append(
            {
                "policy": name + on_device(record, records),
                "lines back": distance(record),
                **{k: round(100 * v, 2) for k, v in share.items()},
            }
        )
    values.sort(key=lambda v: v["lines back"])
    line = line_tokens(records[0])
    at = [{"at": round(capacity / line, 2), "what": "as far as the cache reaches"}] if line else []
    back = {
        "field": "lines back", "type": "quantitative", "title": "lines back", "scale": {"type": "log", "base": 2},
        "axis": {"format": ",d", "values": sorted({v["lines back"] for v in values})},
    }  # fmt: skip
    right = {"field": "right", "type": "quantitative", "title": "percent right", "scale": {"domain": [0, 100]}}
    errors = {"x": back, "y": {**right, "field": "low"}, "y2": {"field": "high"}, "color": policy()}
    return {
        "layer": [
            *marks(at),
            {"data": {"values": values}, "mark": {"type": "rule", "strokeWidth": 1}, "encoding": errors},
            {
                "data": {"values": values}, "mark": {"type": "line", "point": True, "strokeWidth": 2},
                "encoding": {"x": back, "y": right, "color": policy()},
            },
        ]
    }  # fmt: skip
