"""Right answers by where in the prompt the answer was told: a heat map, as of needle tests.

Source: Liu et al. 2023, "Lost in the Middle", arXiv:2307.03172, for the question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerCounts
from kvbench.harness.report import chart
from kvbench.harness.report.pairing import question

_CELL = 26  # pixels
_TENTHS = [f"{10 * tenth} to {10 * tenth + 10} %" for tenth in range(10)]
Depths = Mapping[str, AnswerCounts]  # by tenth of the prompt, "0" to "9"


def over_depths(by_task: Mapping[str, Mapping[str, Depths]], record: Record) -> chart.Chart:
    """A panel per task, a column per policy, a row per tenth of the prompt; the lightest is all right.

    Args:
        by_task: counts of each policy, by task and by the policy's name with its capacity.
        record: any of those that the counts are of.
    """
    panels = [_panel(task, policies) for task, policies in by_task.items()]
    alt = f"Right answers of {{model}} by depth of what is asked for and by policy: {', '.join(by_task)}."
    spec = panels[0] if len(panels) == 1 else {"vconcat": panels}
    return chart.Chart.from_record(record, "depth", question(record) + "depth", alt, spec)


def _panel(task: str, policies: Mapping[str, Depths]) -> dict[str, Any]:
    values = [
        {"policy": name, "depth": _TENTHS[int(tenth)], "right": round(100 * counts.right / counts.questions, 1)}
        for name, depths in policies.items()
        for tenth, counts in depths.items()
    ]
    names = {"field": "policy", "type": "nominal", "sort": None, "title": None}
    depth = {"field": "depth", "type": "ordinal", "title": "depth in the prompt", "scale": {"domain": _TENTHS}}
    right = {"field": "right", "type": "quantitative", "title": "right, %", "scale": {"domain": [0, 100], "scheme": "viridis"}}
    return {
        "title": task,
        "data": {"values": values},
        "mark": "rect",
        "width": {"step": _CELL},
        "height": {"step": _CELL // 2},
        "encoding": {"x": names | {"axis": {"labelAngle": -45, "labelLimit": 260}}, "y": depth, "color": right},
    }
