"""Charts of the attention task: heads as a heatmap, curves over layers, and patches of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import short_titles
from kvbench.harness.report.pairing import question
from kvbench.harness.tasks.attention.schema import AttentionMetrics, Patches

_CELL_PIXELS, _MOST_PIXELS = 26, 480
_SHADES = {"scheme": "blues"}


def heads(record: Record) -> Chart:
    """Layer by head: the attention that each head gives to the first token. The scale starts at 0 and ends at 1."""
    metrics = record.measured(AttentionMetrics)
    assert metrics is not None
    values = [
        {"layer": layer, "head": head, "share": round(x, 4)}
        for layer, row in enumerate(metrics.first_by_head)
        for head, x in enumerate(row)
    ]
    spec = {
        "data": {"values": values}, "mark": "rect", **_size(len(metrics.first_by_head[0]), len(metrics.first_by_head)),
        "encoding": {
            "x": {"field": "head", "type": "ordinal", "title": "query head", "axis": {"labelAngle": 0, "labelOverlap": True}},
            "y": {"field": "layer", "type": "ordinal", "title": "layer", "axis": {"labelOverlap": True}},
            "color": {
                "field": "share", "type": "quantitative", "title": ["attention to", "the first token"],
                "scale": {"domain": [0, 1], **_SHADES}, "legend": {"format": ".0%"},
            },
        },
    }  # fmt: skip
    alt = "Attention that each head of {model} gives to the first token, layer by head"
    return Chart.from_record(record, "attention heads", record.cell_id, f"{alt}, {_text_of(record)}.", spec)


def over_layers(records: Sequence[Record]) -> Chart:
    """Curves over layers: attention to the first token, its deviation under full attention, entropy; and what policies lose."""
    values, lost, band = [], [], []
    for name, record in zip(short_titles(records), records, strict=True):
        metrics = record.measured(AttentionMetrics)
        assert metrics is not None
        for number, layer in enumerate(metrics.layers):
            values.append({"policy": name, "layer": number, "late": layer.late, "entropy": layer.entropy})
            if record.cell.is_dense:
                low, high = max(0.0, layer.late - layer.late_deviation), min(1.0, layer.late + layer.late_deviation)
                band.append({"policy": name, "layer": number, "low": low, "high": high})
            if layer.lost is not None:
                lost.append({"policy": name, "layer": number, "lost": layer.lost})
    x = {"field": "layer", "type": "quantitative", "title": "layer", "axis": {"tickMinStep": 1, "format": "d"}}
    names = list(dict.fromkeys(v["policy"] for v in values))
    colour = {
        "field": "policy", "type": "nominal", "scale": {"domain": names}, "title": "policy", "legend": {"symbolOpacity": 1},
    }  # fmt: skip
    share: dict[str, Any] = {"type": "quantitative", "scale": {"domain": [0, 1]}, "axis": {"format": ".0%"}}
    line = {"type": "line", "point": True, "strokeWidth": 2}
    first = {
        "title": "last query to the first token", "data": {"values": values}, "layer": [
            {"data": {"values": band}, "mark": {"type": "area", "opacity": 0.12}, "encoding": {
                "x": x, "y": {"field": "low", **share, "title": "attention"}, "y2": {"field": "high"}, "color": colour,
            }},
            {"mark": line, "encoding": {"x": x, "y": {"field": "late", **share, "title": "attention"}, "color": colour}},
        ],
    }  # fmt: skip
    entropy = {
        "title": "entropy of a query's weights", "data": {"values": values}, "mark": line, "encoding": {
            "x": x, "y": {"field": "entropy", "type": "quantitative", "title": "nats"}, "color": colour,
        },
    }  # fmt: skip
    missing = {
        "title": "attention lost to eviction", "data": {"values": lost}, "mark": line, "encoding": {
            "x": x, "y": {
                "field": "lost", "type": "quantitative", "title": "share of full attention", "scale": {"zero": True},
                "axis": {"format": ".0%"},
            }, "color": colour,
        },
    }  # fmt: skip
    shown: list[dict[str, Any]] = [first, entropy, missing] if lost else [first, entropy]
    panels = [{"width": 240, "height": 200} | panel for panel in shown]
    alt = "Over the layers of {model}: attention of the last query to the first token, entropy of attention"
    alt += ", and the attention that policies lose" if lost else ""
    return Chart.from_record(
        records[0], "attention layers", f"{question(records[0])} {records[0].cell.capacity}", f"{alt}.", {"hconcat": panels}
    )


def patches(record: Record, metrics: AttentionMetrics, patches: Patches) -> Chart:
    """Curves over layers: norms of patches, and the attention that one token of each kind gets."""
    norms, received = [], []
    for number, (layer, first) in enumerate(zip(patches.layers, metrics.layers, strict=True)):
        norms += [
            {"layer": number, "of": name, "norm": x}
            for name, x in (("median", layer.norm_median), ("largest", layer.norm_largest))
        ]
        kinds = {"outlier": layer.to_outlier, "other patch": layer.to_patch, "register": layer.to_register}
        kinds |= {"[CLS]": first.first} if patches.special > patches.registers else {}
        received += [{"layer": number, "token": name, "attention": x} for name, x in kinds.items() if x is not None]
    x = {"field": "layer", "type": "quantitative", "title": "layer", "axis": {"tickMinStep": 1, "format": "d"}}
    line = {"type": "line", "point": True, "strokeWidth": 2}
    panels: list[dict[str, Any]] = [
        {
            "title": "norms of patches", "data": {"values": norms}, "mark": line, "encoding": {
                "x": x, "y": {"field": "norm", "type": "quantitative", "title": "norm", "scale": {"type": "symlog"}},
                "color": {"field": "of", "type": "nominal", "title": "norm"},
            },
        },
        {
            "title": "attention that a token gets", "data": {"values": received}, "mark": line, "encoding": {
                "x": x, "y": {"field": "attention", "type": "quantitative", "title": "attention", "axis": {"format": ".1%"}},
                "color": {"field": "token", "type": "nominal", "title": "token"},
            },
        },
    ]  # fmt: skip
    alt = "Over the layers of {model}: norms of patches, and attention to [CLS], registers, outliers and other patches"
    spec = {
        "hconcat": [{"width": 240, "height": 200} | panel for panel in panels],
        "resolve": {"scale": {"color": "independent"}},
    }
    return Chart.from_record(record, "attention patches", record.cell_id, f"{alt}, {metrics.samples} images.", spec)


def _size(columns: int, rows: int) -> dict[str, int]:
    return {"width": min(_MOST_PIXELS, _CELL_PIXELS * columns), "height": min(_MOST_PIXELS, _CELL_PIXELS * rows)}


def _text_of(record: Record) -> str:
    metrics = record.measured(AttentionMetrics)
    assert metrics is not None
    return f"{metrics.samples} samples of {metrics.tokens:,} tokens"
