"""Task that measures attention under full attention: sinks, maps of logits, entropy.

Source: the sink metric of Gu et al. 2024, arXiv:2410.10781, Section 3.1 (alpha of a token, epsilon 0.3, T = 64); Figures 11 to 13
    of Xiao et al. 2023, arXiv:2309.17453.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, ClassVar

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report import chart, logit_maps
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import measured_table, number, percent, task_line
from kvbench.harness.report.pairing import question
from kvbench.harness.report.rows import short_titles
from kvbench.harness.tasks.attention.attention_options import AttentionMetrics, AttentionOptions, figures
from kvbench.harness.tasks.common.samples import SampleTask
from kvbench.harness.tasks.task import Job, Options

_CELL_PIXELS, _MOST_PIXELS = 26, 480  # sizes of the heatmap of heads
Panel = dict[str, Any]  # panel of a chart in Vega-Lite


class AttentionTask(SampleTask):
    """Attention of heads under full attention.

    Attributes:
        shown_figures: columns of the table: functions that format a record's figure, by heading.
        explanation: sentence about the figures, above the table.
    """

    options: ClassVar[type[Options]] = AttentionOptions
    metrics: ClassVar[type[Metrics]] = AttentionMetrics
    trace = logit_maps.SUFFIX
    measures = "attention"
    shown_figures: ClassVar[dict[str, Callable[[Any], str]]] = {
        "sink heads": lambda m: percent(m.sink_heads, m.sink_heads_interval),
        "first token": lambda m: percent(m.first, m.first_interval),
        "no token": lambda m: percent(m.rest),
        "entropy": lambda m: f"{m.entropy:.3f}",
        "largest logit": lambda m: number(m.largest_logit),
    }
    explanation: ClassVar[str] = ""

    @staticmethod
    def run(options: Any, job: Job) -> AttentionMetrics:
        """Record the attention of every sample, and write the notes to the trace."""
        from kvbench.harness.tasks.attention.watch_samples import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute all figures from the trace."""
        with np.load(trace) as noted:
            return figures(noted, record.cell.task_options(AttentionOptions).epsilon)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return a row per policy, heatmaps of heads, curves over layers, and details of full attention."""
        measured = [r for r in records if r.measured(AttentionMetrics)]
        epsilon = records[0].cell.task_options(AttentionOptions).epsilon
        about = (
            f"{task_line(records[0])}A head's sink gets more than {epsilon:g} of its attention, mean over queries. "
            f"{cls.explanation}With 95 % intervals over samples:\n"
        )
        lines: list[str | Chart] = [about, *measured_table(records, AttentionMetrics, cls._row)]
        if measured:
            full = [r for r in measured if r.cell.is_dense][:1]
            lines += [*map(_heads_chart, full), cls.layers_chart(measured), *(line for r in full for line in cls.details(r))]
        return lines

    @classmethod
    def details(cls, record: Record) -> list[str | Chart]:
        """Return lines and charts about full attention, shown below the other charts."""
        return []

    @classmethod
    def layers_chart(cls, records: Sequence[Record]) -> Chart:
        """Return the chart of curves over layers."""
        return layers_chart(records, [])

    @classmethod
    def _row(cls, _: Record, metrics: AttentionMetrics) -> dict[str, str]:
        return {head: shown(metrics) for head, shown in cls.shown_figures.items()}


def _heads_chart(record: Record) -> Chart:
    """Return a heatmap, layer by head, of the attention that each head gives to the first token, on a scale from 0 to 1."""
    metrics = record.measured(AttentionMetrics)
    assert metrics is not None
    values = [
        {"layer": layer, "head": head, "share": round(x, 4)}
        for layer, row in enumerate(metrics.first_by_head)
        for head, x in enumerate(row)
    ]
    shade = chart.channel("share", None, scale={"domain": [0, 1], "scheme": "blues"}, legend={"format": ".0%"})
    spec = chart.heat_map(
        values,
        min(_MOST_PIXELS, _CELL_PIXELS * len(metrics.first_by_head[0])),
        min(_MOST_PIXELS, _CELL_PIXELS * len(metrics.first_by_head)),
        x=chart.channel("head", "query head", "ordinal", axis={"labelAngle": 0, "labelOverlap": True}),
        y=chart.channel("layer", "layer", "ordinal", axis={"labelOverlap": True}),
        color=shade | {"title": ["attention to", "the first token"]},
    )
    alt = "Attention that each head of {model} gives to the first token, layer by head"
    text = f"{metrics.samples} samples of {metrics.tokens:,} tokens"
    return Chart.from_record(record, "attention heads", record.cell_id, f"{alt}, {text}.", spec)


X_LAYER: Panel = chart.channel("layer", "layer", axis={"tickMinStep": 1, "format": "d"})


def layers_chart(records: Sequence[Record], more: Sequence[Panel], alt: str = "") -> Chart:
    """Return curves over layers: attention to the first token, its deviation under full attention, and entropy.

    Args:
        more: further panels.
        alt: text that is added to the alternative text.
    """
    values, band = [], []
    for name, record in zip(short_titles(records), records, strict=True):
        metrics = record.measured(AttentionMetrics)
        assert metrics is not None
        for index, layer in enumerate(metrics.layers):
            values.append({"policy": name, "layer": index, "late": layer.late, "entropy": layer.entropy})
            if record.cell.is_dense:
                low, high = max(0.0, layer.late - layer.late_deviation), min(1.0, layer.late + layer.late_deviation)
                band.append({"policy": name, "layer": index, "low": low, "high": high})
    colour = policy_colour(records)
    share = chart.channel("late", "attention", scale={"domain": [0, 1]}, axis={"format": ".0%"})
    ends = {"x": X_LAYER, "y": share | {"field": "low"}, "y2": {"field": "high"}, "color": colour}
    deviation = {"data": {"values": band}, "mark": {"type": "area", "opacity": 0.12}, "encoding": ends}
    first = {"title": "last query to the first token", "layer": [deviation, chart.curves(values, X_LAYER, share, colour)]}
    entropy = {"title": "entropy of a query's weights"} | chart.curves(values, X_LAYER, chart.channel("entropy", "nats"), colour)
    shown: list[Panel] = [first, entropy, *more]
    panels = [{"width": 240, "height": 200} | panel for panel in shown]
    alt = "Over the layers of {model}: attention of the last query to the first token, entropy of attention" + alt
    return Chart.from_record(
        records[0], "attention layers", f"{question(records[0])} {records[0].cell.capacity}", f"{alt}.", {"hconcat": panels}
    )


def policy_colour(records: Sequence[Record]) -> Panel:
    """Return the encoding that gives each policy a colour."""
    names = list(dict.fromkeys(short_titles(records)))
    return chart.channel("policy", "policy", "nominal", scale={"domain": names}, legend={"symbolOpacity": 1})
