"""Where attention goes: sinks, maps of logits, entropy, massive activations, and what a policy loses of it.

Source: the sink metric of Gu et al. 2024, arXiv:2410.10781, Section 3.1 (alpha of a token, epsilon 0.3, T = 64); Figures 11 to 13
    of Xiao et al. 2023, arXiv:2309.17453; massive activations of Sun et al. 2024, arXiv:2402.17762.
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
from kvbench.harness.tasks.task import Job, Options, Task, Tokenizer

if TYPE_CHECKING:
    from kvbench.harness.tasks.attention.data import Samples


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
    def data(options: AttentionOptions, tokenizer: Tokenizer, directory: Path | None) -> Samples:
        """Pieces of books or of generated prose."""
        from kvbench.harness.tasks.attention.data import samples

        return samples(options, tokenizer, directory)

    @staticmethod
    def total(options: AttentionOptions) -> int:
        """All tokens."""
        return options.samples * options.tokens

    @classmethod
    def longest(cls, options: AttentionOptions) -> int:
        """A sample."""
        return options.tokens

    @classmethod
    def has_prompt(cls, options: AttentionOptions) -> bool:
        """Whether the first tokens of each sample are its prompt."""
        return options.prompt is not None

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
            return figures(noted, record.cell.task_options(AttentionOptions).epsilon)

    @classmethod
    def headline(cls, record: Record) -> str:
        """The sink metric."""
        return page.headline(record)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """A row per policy, heads as heatmaps, curves over layers, and lists of sinks and massive activations."""
        return page.body(records)
