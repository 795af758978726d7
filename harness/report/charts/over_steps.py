"""Figures of one suite over the steps of a pretraining: sink heads, massive activations, and what losing the first token costs.

Models that `bench pretrain` keeps on the way are told by their names: NAME-step-000250.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.chart import Chart, file_name, make_visible
from kvbench.harness.report.markdown import md, number, short_titles, table

KEPT = re.compile(r"(.+)-step-(\d+)")
_FIGURES = {"sink_heads": "sink heads", "hidden_largest": "largest activation"}  # of a task's metrics
_PERPLEXITY = "perplexity"


def body(suite: str, records: Sequence[Record]) -> list[str | Chart]:
    """A table and a chart over steps; nothing unless a training has two kept models with figures.

    Args:
        suite: name.
        records: all of the suite, of any models.
    """
    values = [value for record in records if record.status == "ok" for value in _values(record)]
    of_several = {v["training"] for v in values if len({w["step"] for w in values if w["training"] == v["training"]}) > 1}
    values = [v for v in values if v["training"] in of_several]
    if not values:
        return []
    values.sort(key=lambda v: (v["training"], v["step"], v["line"]))
    panels = [_panel([v for v in values if v["figure"] == f], f) for f in dict.fromkeys(v["figure"] for v in values)]
    spec = {"hconcat": panels, "resolve": {"scale": {"color": "independent"}}}
    alt = f"{', '.join(dict.fromkeys(v['figure'] for v in values))} over training steps of {', '.join(sorted(of_several))}."
    chart = Chart(file_name(f"{suite} over steps", suite), alt, make_visible(spec), suite)
    return [f"## {md(suite)}: over training steps\n", *_table(values), chart]


def _values(record: Record) -> list[dict[str, Any]]:
    """Figures of a kept model's record, each a point of a curve."""
    kept = KEPT.fullmatch(record.cell.model.id)
    if kept is None:
        return []
    training, step = kept[1], int(kept[2])
    point = {"training": training, "step": step}
    metrics = record.metrics.as_json()
    found = [
        point | {"figure": title, "line": training, "value": metrics[name]}
        for name, title in _FIGURES.items()
        if record.cell.is_dense and isinstance(metrics.get(name), (int, float))
    ]
    nll = record.measured(NllMetrics)
    if nll is not None:
        line = f"{training}, {short_titles([record])[0]}"
        found.append(point | {"figure": _PERPLEXITY, "line": line, "value": nll.perplexity})
    return found


def _panel(values: list[dict[str, Any]], figure: str) -> dict[str, Any]:
    """One figure over steps, a line per training, or per training and policy."""
    scale: dict[str, Any] = (
        {"type": "log"} if figure == _PERPLEXITY else {} if any(v["value"] for v in values) else {"domain": [0, 1]}
    )
    alone = {"legend": None} if len({v["line"] for v in values}) == 1 else {}
    return {
        "width": 300, "height": 240, "data": {"values": values}, "mark": {"type": "line", "point": True, "strokeWidth": 2},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "step"},
            "y": {"field": "value", "type": "quantitative", "title": figure, "scale": scale},
            "color": {"field": "line", "type": "nominal", "title": None, **alone},
        },
    }  # fmt: skip


def _table(values: list[dict[str, Any]]) -> list[str]:
    """A row per training and step, a column per figure and policy."""
    columns = {v["figure"] + v["line"].removeprefix(v["training"]): None for v in values}
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for v in values:
        cells.setdefault((v["training"], v["step"]), {})[v["figure"] + v["line"].removeprefix(v["training"])] = v["value"]
    rows = [[md(training), f"{step:,}", *(number(row.get(c)) for c in columns)] for (training, step), row in cells.items()]
    return table(["training", "step", *map(md, columns)], rows, "lr" + "r" * len(columns))
