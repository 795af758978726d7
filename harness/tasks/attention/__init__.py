"""Where attention goes: sinks, maps of logits, entropy, massive activations, and what a policy loses of it.

Source: the sink metric of Gu et al. 2024, arXiv:2410.10781, Section 3.1 (alpha of a token, epsilon 0.3, T = 64); Figures 11 to 13
    of Xiao et al. 2023, arXiv:2309.17453; massive activations of Sun et al. 2024, arXiv:2402.17762;
    outliers among the patches of vision transformers of Darcet et al. 2023, arXiv:2309.16588.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report import logit_maps
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import count, md, number, percent, status, table, task_line
from kvbench.harness.report.sections import row_label
from kvbench.harness.tasks.attention import chart
from kvbench.harness.tasks.attention.figures import OUTLIER_TIMES_MEDIAN, figures
from kvbench.harness.tasks.attention.schema import AttentionMetrics, AttentionOptions, Patches
from kvbench.harness.tasks.task import Job, Options, Task

if TYPE_CHECKING:
    from kvbench.harness.tasks.attention.measure import ImageSamples
    from kvbench.harness.tasks.common.samples import Samples

_TOKENS_OF_AN_IMAGE = 257  # for estimates: 224 pixels in patches of 14, and [CLS]


class AttentionTask(Task):
    """What heads attend to, under full attention and under policies."""

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
        """All tokens."""
        return options.samples * (options.tokens or _TOKENS_OF_AN_IMAGE)

    @classmethod
    def longest(cls, options: AttentionOptions) -> int:
        """A sample."""
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
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """All figures but the texts of tokens."""
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
                *map(chart.heads, full),
                chart.over_layers(measured),
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
            f"{at}", percent(x.key_channels), percent(x.value_channels),
            *(f"{y:.3g}" for both in (x.initial_norm, x.initial_cosine) for y in (both[0], max(both[1:4]), both[4])),
        ]
        for at, x in enumerate(metrics.layers)
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
    return [f"{_in_words(metrics.patches)}\n", chart.patches(record, metrics, metrics.patches)]


def _in_words(patches: Patches) -> str:
    last = patches.layers[-1]
    before = f"{patches.special} special token{'' if patches.special == 1 else 's'}"
    before += f", {patches.registers} of them registers," if patches.registers else ""
    where = "; ".join(f"row {x.row}, column {x.column} ({x.times:,} times)" for x in patches.positions[:_SHOWN])
    most = [] if last.to_outlier is None else [max(_ratio(x.to_outlier, x.to_patch) for x in patches.layers)]
    sentences = [
        f"An image is {patches.rows} x {patches.columns} patches, with {before} before them.",
        f"Outliers, by the norm after the last layer: {percent(patches.outliers, patches.outliers_interval)} of patches over "
        f"{OUTLIER_TIMES_MEDIAN:g} times the median of their image (our criterion);",
        f"{percent(patches.over_cutoff, patches.over_cutoff_interval)} over {patches.norm_cutoff:g} (Darcet et al. 2023).",
        f"The median norm is {last.norm_median:.4g}, the largest {last.norm_largest:.4g}.",
        *(f"An outlier gets up to {x:.3g} times the attention of another patch, in one layer." for x in most),
        *([f"Most often they are at {where}."] if where else []),
    ]
    return " ".join(sentences)


def _ratio(outlier: float | None, patch: float) -> float:
    return 0.0 if outlier is None or not patch else outlier / patch
