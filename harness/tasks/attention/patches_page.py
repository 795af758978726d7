"""What the attention page says of images: outliers among patches, their norms and the attention they get."""

from __future__ import annotations

from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import percent
from kvbench.harness.tasks.attention.patches import OUTLIER_TIMES_MEDIAN
from kvbench.harness.tasks.attention.schema import AttentionMetrics, Patches

_SHOWN = 8  # positions


def patches_of(record: Record) -> list[str | Chart]:
    """Sentences and a chart; nothing for a text."""
    metrics = record.measured(AttentionMetrics)
    if metrics is None or metrics.patches is None:
        return []
    return [f"{_in_words(metrics.patches)}\n", _chart(record, metrics, metrics.patches)]


def _in_words(patches: Patches) -> str:
    last = patches.layers[-1]
    before = f"{patches.special} special token{'' if patches.special == 1 else 's'}"
    before += f", {patches.registers} of them registers," if patches.registers else ""
    where = "; ".join(f"row {x.row}, column {x.column} ({x.times:,} times)" for x in patches.positions[:_SHOWN])
    most = [] if last.to_outlier is None else [max(_ratio(x.to_outlier, x.to_patch) for x in patches.layers)]
    return " ".join([
        f"An image is {patches.rows} x {patches.columns} patches, with {before} before them.",
        f"Outliers, by the norm after the last layer: {percent(patches.outliers, patches.outliers_interval)} of patches over "
        f"{OUTLIER_TIMES_MEDIAN:g} times the median of their image (our criterion);",
        f"{percent(patches.over_cutoff, patches.over_cutoff_interval)} over {patches.norm_cutoff:g} (Darcet et al. 2023).",
        f"The median norm is {last.norm_median:.4g}, the largest {last.norm_largest:.4g}.",
        *(f"An outlier gets up to {x:.3g} times the attention of another patch, in one layer." for x in most),
        *([f"Most often they are at {where}."] if where else []),
    ])  # fmt: skip


def _ratio(outlier: float | None, patch: float) -> float:
    return 0.0 if outlier is None or not patch else outlier / patch


def _chart(record: Record, metrics: AttentionMetrics, patches: Patches) -> Chart:
    """Curves over layers: norms of patches, and the attention that one token of each kind gets."""
    norms, received = [], []
    for number, (layer, first) in enumerate(zip(patches.layers, metrics.layers, strict=True)):
        norms += [{"layer": number, "of": name, "norm": x} for name, x in (
            ("median", layer.norm_median), ("largest", layer.norm_largest))]  # fmt: skip
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
