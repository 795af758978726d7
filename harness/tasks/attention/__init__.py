"""Task that measures attention: sinks, maps of logits, entropy, massive activations, and the attention lost to eviction.

Source: the sink metric of Gu et al. 2024, arXiv:2410.10781, Section 3.1 (alpha of a token, epsilon 0.3, T = 64); Figures 11 to 13
    of Xiao et al. 2023, arXiv:2309.17453; massive activations of Sun et al. 2024, arXiv:2402.17762;
    outliers among the patches of vision transformers of Darcet et al. 2023, arXiv:2309.16588.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report import logit_maps
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import count, digits, md, number, percent, short_titles, status, table, task_line
from kvbench.harness.report.pairing import question
from kvbench.harness.report.sections import row_label
from kvbench.harness.tasks.attention.figures import OUTLIER_TIMES_MEDIAN, figures
from kvbench.harness.tasks.attention.schema import AttentionMetrics, AttentionOptions, Patches
from kvbench.harness.tasks.task import Job, Options, Task

if TYPE_CHECKING:
    from kvbench.harness.tasks.attention.measure import ImageSamples
    from kvbench.harness.tasks.common.samples import Samples

_TOKENS_OF_AN_IMAGE = 257  # for estimates: 224 pixels in patches of 14, and [CLS]
_CELL_PIXELS, _MOST_PIXELS = 26, 480  # of the heatmap of heads
_SHADES = {"scheme": "blues"}


class AttentionTask(Task):
    """Attention of heads under full attention and under policies."""

    options: ClassVar[type[Options]] = AttentionOptions
    metrics: ClassVar[type[Metrics]] = AttentionMetrics
    trace: ClassVar[str | None] = logit_maps.SUFFIX
    named_by: ClassVar[tuple[str, ...]] = ("data", "tokens")
    shown_options: ClassVar[tuple[str, ...] | None] = ("data", "tokens", "samples", "prompt")
    speed_counts: ClassVar[bool] = False
    watches: ClassVar[bool] = True

    @staticmethod
    def data(options: AttentionOptions, tokenizer: Any, directory: Path | None) -> Samples | ImageSamples:
        """Pieces of books or of generated prose, or images."""
        if options.reads_images:
            from kvbench.harness.tasks.attention.measure import image_samples

            return image_samples(options, tokenizer, directory)
        from kvbench.harness.tasks.common.samples import samples

        return samples(options.of_text(), tokenizer, directory)

    @classmethod
    def reads_images(cls, options: AttentionOptions) -> bool:
        """Whether the samples are images."""
        return options.reads_images

    @staticmethod
    def total(options: AttentionOptions) -> int:
        """Tokens of all samples."""
        return options.samples * (options.tokens or _TOKENS_OF_AN_IMAGE)

    @classmethod
    def longest(cls, options: AttentionOptions) -> int:
        """Tokens of a sample."""
        return options.tokens or _TOKENS_OF_AN_IMAGE

    @classmethod
    def prompt_tokens(cls, options: AttentionOptions) -> int | None:
        """The tokens of each sample that are its prompt."""
        return options.prompt

    @staticmethod
    def run(options: AttentionOptions, job: Job) -> AttentionMetrics:
        """Look at every sample; the trace gets what was noted of each."""
        from kvbench.harness.tasks.attention.measure import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute all figures from the trace, except the texts of tokens."""
        with np.load(trace) as noted:
            options = record.cell.task_options(AttentionOptions)
            return figures(noted, options.epsilon, options.norm_cutoff)

    @classmethod
    def headline(cls, record: Record) -> str:
        """The sink metric."""
        metrics = record.measured(AttentionMetrics)
        if metrics is None:
            return ""
        lost = "" if metrics.lost is None else f", {100 * metrics.lost:.1f} % of attention lost"
        outliers = "" if metrics.patches is None else f", {100 * metrics.patches.outliers:.1f} % of patches outliers"
        return f"first token a sink of {100 * metrics.sink_heads:.0f} % of heads{lost}{outliers}"

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """A row per policy, heads as heatmaps, curves over layers, and lists of sinks and massive activations."""
        measured = [r for r in records if r.measured(AttentionMetrics)]
        epsilon = records[0].cell.task_options(AttentionOptions).epsilon
        about = (
            f"{task_line(records[0])}A head's sink gets more than {epsilon:g} of its attention, mean over queries. Attention "
            "lost is what full attention would have given to tokens that were evicted before. With 95 % intervals over samples:\n"
        )
        rows = [_row(record, records) for record in records]
        head, alignment = ["policy", "capacity", *_FIGURES, "status"], "lr" + "r" * len(_FIGURES) + "l"
        lines: list[str | Chart] = [about, *table(head, rows, alignment)]
        if measured:
            full = [r for r in measured if r.cell.is_dense][:1]
            lines += [
                *map(_heads_chart, full),
                _layers_chart(measured),
                *(line for r in full for line in (*_patches(r), *_outstanding(r), *_vectors(r))),
            ]
        return lines


_FIGURES = ("sink heads", "first token", "no token", "entropy", "largest logit", "largest activation", "lost")
_SHOWN = 8  # other sinks, massive activations, and positions of outliers


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    m = record.measured(AttentionMetrics)
    if m is None:
        return [row_label(record, records), count(record.cell.capacity), *[""] * len(_FIGURES), status(record)]
    return [
        row_label(record, records), count(record.cell.capacity), percent(m.sink_heads, m.sink_heads_interval),
        percent(m.first, m.first_interval), "" if m.rest is None else percent(m.rest, None), f"{m.entropy:.3f}",
        number(m.largest_logit), number(m.hidden_largest), "" if m.lost is None else percent(m.lost, m.lost_interval),
        status(record),
    ]  # fmt: skip


def _outstanding(record: Record) -> list[str]:
    """Other sinks and massive activations, in words."""
    metrics = record.measured(AttentionMetrics)
    assert metrics is not None
    sinks = [
        f"`{md(x.text)}` ({x.times:,} times, from position {x.position}; {100 * x.heads:.0f} % of heads)"
        for x in metrics.sinks[:_SHOWN]
    ]
    massive = [
        f"layer {x.layer}, dim {x.dim}: {x.magnitude:,.0f} at `{md(x.text)}` (position {x.position}, {x.times:,} times)"
        for x in metrics.massive[:_SHOWN]
    ]
    sentences = [
        "Other sinks under full attention: " + ("; ".join(sinks) if sinks else "none") + ".",
        "Massive activations (over 100 and 1,000 times the median of their layer): "
        + ("; ".join(massive) if massive else "none")
        + ".",
    ]
    return ["\n\n".join(sentences) + "\n"]


def _vectors(record: Record) -> list[str]:
    """A row a layer: channels of keys and values, and the first tokens in hidden space."""
    metrics = record.measured(AttentionMetrics)
    assert metrics is not None
    rows = [
        [
            f"{index}", percent(x.key_channels), percent(x.value_channels),
            *(digits(y, 3) for both in (x.initial_norm, x.initial_cosine) for y in (both[0], max(both[1:4]), both[4])),
        ]
        for index, x in enumerate(metrics.layers)
        if x.key_channels is not None and x.value_channels is not None and x.initial_norm and x.initial_cosine
    ]  # fmt: skip
    if not rows:
        return []
    about = (
        "Share of energy in the largest sixteenth of a head's channels; and hidden states: norm, and mean cosine to the tokens "
    )
    about += "from the fifth on, of the first token, of the largest of the three after it, and of those.\n"
    hidden = [f"{figure}, {whose}" for figure in ("norm", "cosine") for whose in ("first", "second to fourth", "others")]
    return [about, *table(["layer", "keys", "values", *hidden], rows, "r" * 9)]


def _patches(record: Record) -> list[str | Chart]:
    """Sentences and a chart; nothing for a text."""
    metrics = record.measured(AttentionMetrics)
    if metrics is None or metrics.patches is None:
        return []
    return [f"{_in_words(metrics.patches)}\n", _patches_chart(record, metrics, metrics.patches)]


def _in_words(patches: Patches) -> str:
    last = patches.layers[-1]
    before = f"{patches.special} special token{'' if patches.special == 1 else 's'}"
    before += f", {patches.registers} of them registers," if patches.registers else ""
    places = "; ".join(f"row {x.row}, column {x.column} ({x.times:,} times)" for x in patches.positions[:_SHOWN])
    most = [] if last.to_outlier is None else [max(_ratio(x.to_outlier, x.to_patch) for x in patches.layers)]
    sentences = [
        f"An image is {patches.rows} x {patches.columns} patches, with {before} before them.",
        f"Outliers, by the norm after the last layer: {percent(patches.outliers, patches.outliers_interval)} of patches over "
        f"{OUTLIER_TIMES_MEDIAN:g} times the median of their image (our criterion);",
        f"{percent(patches.over_cutoff, patches.over_cutoff_interval)} over {patches.norm_cutoff:g} (Darcet et al. 2023).",
        f"The median norm is {digits(last.norm_median)}, the largest {digits(last.norm_largest)}.",
        *(f"An outlier gets up to {digits(x, 3)} times the attention of another patch, in one layer." for x in most),
        *([f"Most often they are at {places}."] if places else []),
    ]
    return " ".join(sentences)


def _ratio(outlier: float | None, patch: float) -> float:
    return 0.0 if outlier is None or not patch else outlier / patch


def _heads_chart(record: Record) -> Chart:
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


def _layers_chart(records: Sequence[Record]) -> Chart:
    """Curves over layers: attention to the first token, its deviation under full attention, entropy; and what policies lose."""
    values, lost, band = [], [], []
    for name, record in zip(short_titles(records), records, strict=True):
        metrics = record.measured(AttentionMetrics)
        assert metrics is not None
        for index, layer in enumerate(metrics.layers):
            values.append({"policy": name, "layer": index, "late": layer.late, "entropy": layer.entropy})
            if record.cell.is_dense:
                low, high = max(0.0, layer.late - layer.late_deviation), min(1.0, layer.late + layer.late_deviation)
                band.append({"policy": name, "layer": index, "low": low, "high": high})
            if layer.lost is not None:
                lost.append({"policy": name, "layer": index, "lost": layer.lost})
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


def _patches_chart(record: Record, metrics: AttentionMetrics, patches: Patches) -> Chart:
    """Curves over layers: norms of patches, and the attention that one token of each kind gets."""
    norms, received = [], []
    for index, (layer, first) in enumerate(zip(patches.layers, metrics.layers, strict=True)):
        norms += [
            {"layer": index, "of": name, "norm": x}
            for name, x in (("median", layer.norm_median), ("largest", layer.norm_largest))
        ]
        kinds = {"outlier": layer.to_outlier, "other patch": layer.to_patch, "register": layer.to_register}
        kinds |= {"[CLS]": first.first} if patches.special > patches.registers else {}
        received += [{"layer": index, "token": name, "attention": x} for name, x in kinds.items() if x is not None]
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
