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
from kvbench.harness.tasks.attention import page
from kvbench.harness.tasks.attention.figures import figures
from kvbench.harness.tasks.attention.schema import AttentionMetrics, AttentionOptions
from kvbench.harness.tasks.task import Job, Options, Task

if TYPE_CHECKING:
    from kvbench.harness.tasks.attention.images import ImageSamples
    from kvbench.harness.tasks.common.samples import Samples

_TOKENS_OF_AN_IMAGE = 257  # for estimates: 224 pixels in patches of 14, and [CLS]


class Attention(Task):
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
            from kvbench.harness.tasks.attention.images import image_samples

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
        return page.headline(record)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """A row per policy, heads as heatmaps, curves over layers, and lists of sinks and massive activations."""
        return page.body(records)
