"""The lab's attention task, with vision transformers and encoders, massive activations, and attention lost to eviction.

`lab/entry_points.txt` names the task, so that it replaces the attention task of the harness.

Source: massive activations of Sun et al. 2024, arXiv:2402.17762; outliers among the patches of vision transformers of Darcet et
    al. 2023, arXiv:2309.16588.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report.chart import Chart, channel, curves
from kvbench.harness.report.markdown import digits, md, number, percent, table
from kvbench.harness.report.rows import short_titles
from kvbench.harness.tasks import attention
from kvbench.harness.tasks.attention import X_LAYER, Panel, layers_chart, policy_colour
from kvbench.harness.tasks.task import Job, Options, Tokenizer, Workload
from kvbench.lab.attention.figures import OUTLIER_TIMES_MEDIAN, figures
from kvbench.lab.attention.schema import AttentionMetrics, AttentionOptions, Patches

if TYPE_CHECKING:
    from kvbench.harness.engine.model import Model
    from kvbench.harness.tasks.common.samples import Samples
    from kvbench.lab.attention.vision import ImageSamples

_TOKENS_OF_AN_IMAGE = 257  # for estimates: 224 pixels in patches of 14, and [CLS]
_SHOWN = 8  # other sinks, massive activations, and positions of outliers


class AttentionTask(attention.AttentionTask):
    """Attention of heads under full attention and under policies."""

    options: ClassVar[type[Options]] = AttentionOptions
    metrics: ClassVar[type[Metrics]] = AttentionMetrics
    shown_figures: ClassVar[dict[str, Callable[[Any], str]]] = attention.AttentionTask.shown_figures | {
        "largest activation": lambda m: number(m.hidden_largest),
        "lost": lambda m: percent(m.lost, m.lost_interval),
    }
    explanation: ClassVar[str] = "Attention lost is what full attention would have given to tokens that were evicted before. "

    @staticmethod
    def data(options: AttentionOptions, tokenizer: Tokenizer, directory: Path | None) -> Samples | ImageSamples:
        """Pieces of books or of generated prose, or images."""
        if options.reads_images:
            from kvbench.lab.attention.vision import image_samples, load_image_reader

            return image_samples(options, load_image_reader(tokenizer.directory), directory)
        return attention.AttentionTask.data(options.of_text(), tokenizer, directory)  # type: ignore[no-any-return]

    @classmethod
    def workload(cls, options: AttentionOptions) -> Workload:
        """Samples, one after the other; policies may evict after a prompt."""
        return Workload(sequences=options.samples, length=options.tokens or _TOKENS_OF_AN_IMAGE, prompt=options.prompt or 0)

    @classmethod
    def load_model(cls, directory: Path, *args: Any, **kwargs: Any) -> Model:
        """Load a model to be watched, which the decode loop may not be able to drive."""
        from kvbench.lab.attention.measure import load_watched

        return load_watched(directory, *args, **kwargs)

    @staticmethod
    def run(options: AttentionOptions, job: Job) -> AttentionMetrics:
        """Look at every sample; the trace gets what was noted of each."""
        from kvbench.lab.attention.measure import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute all figures from the trace, except the texts of tokens."""
        with np.load(trace) as noted:
            options = record.cell.task_options(AttentionOptions)
            return figures(noted, options.epsilon, options.norm_cutoff)

    @classmethod
    def details(cls, record: Record) -> list[str | Chart]:
        """Outliers among patches, other sinks and massive activations, and a table of keys, values and hidden states."""
        metrics = record.measured(AttentionMetrics)
        assert metrics is not None
        return [*_patches(record, metrics), *_outstanding(metrics), *_vectors(metrics)]

    @classmethod
    def layers_chart(cls, records: Sequence[Record]) -> Chart:
        """Curves over layers, and what policies lose."""
        lost = [
            {"policy": name, "layer": index, "lost": layer.lost}
            for name, record in zip(short_titles(records), records, strict=True)
            if (metrics := record.measured(AttentionMetrics))
            for index, layer in enumerate(metrics.layers)
            if layer.lost is not None
        ]
        if not lost:
            return layers_chart(records, [])
        share = channel("lost", "share of full attention", scale={"zero": True}, axis={"format": ".0%"})
        missing: Panel = curves(lost, X_LAYER, share, policy_colour(records))
        return layers_chart(
            records, [{"title": "attention lost to eviction"} | missing], ", and the attention that policies lose"
        )


def _outstanding(metrics: AttentionMetrics) -> list[str]:
    """Other sinks and massive activations, in words."""
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


def _vectors(metrics: AttentionMetrics) -> list[str]:
    """A row a layer: channels of keys and values, and the first tokens in hidden space."""
    rows = [
        [
            f"{index}",
            percent(x.key_channels),
            percent(x.value_channels),
            *(digits(y, 3) for both in (x.initial_norm, x.initial_cosine) for y in (both[0], max(both[1:4]), both[4])),
        ]
        for index, x in enumerate(metrics.layers)
        if x.key_channels is not None and x.value_channels is not None and x.initial_norm and x.initial_cosine
    ]
    if not rows:
        return []
    about = (
        "Share of energy in the largest sixteenth of a head's channels; and hidden states: norm, and mean cosine to the tokens "
    )
    about += "from the fifth on, of the first token, of the largest of the three after it, and of those.\n"
    hidden = [f"{figure}, {whose}" for figure in ("norm", "cosine") for whose in ("first", "second to fourth", "others")]
    return [about, *table(["layer", "keys", "values", *hidden], rows, "r" * 9)]


def _patches(record: Record, metrics: AttentionMetrics) -> list[str | Chart]:
    """Sentences and a chart; nothing for a text."""
    if metrics.patches is None:
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
    norm, share = channel("norm", "norm", scale={"type": "symlog"}), channel("attention", "attention", axis={"format": ".1%"})
    panels: list[Panel] = [
        {"title": "norms of patches"} | curves(norms, X_LAYER, norm, channel("of", "norm", "nominal")),
        {"title": "attention that a token gets"} | curves(received, X_LAYER, share, channel("token", "token", "nominal")),
    ]
    alt = "Over the layers of {model}: norms of patches, and attention to [CLS], registers, outliers and other patches"
    spec = {
        "hconcat": [{"width": 240, "height": 200} | panel for panel in panels],
        "resolve": {"scale": {"color": "independent"}},
    }
    return Chart.from_record(record, "attention patches", record.cell_id, f"{alt}, {metrics.samples} images.", spec)
