"""How far a policy moves the predictions of dense: KL divergence, and how often both find the same token most likely.

NLL looks at one token of the vocabulary, the one that comes; the KL divergence at all of them. It is 0 only where nothing has
changed, and no luck of the text can hide a change.

Source: Kullback and Leibler 1951, Annals of Mathematical Statistics 22(1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, Traces
from kvbench.harness.tasks.divergence import page
from kvbench.harness.tasks.divergence.figures import figures
from kvbench.harness.tasks.divergence.schema import DivergenceMetrics, DivergenceOptions
from kvbench.harness.tasks.task import Job, Options, Task, Tokenizer

if TYPE_CHECKING:
    from kvbench.harness.tasks.common.samples import Samples


class Divergence(Task):
    """KL(dense || policy) of each next token, on samples no longer than those the model was trained on."""

    options: ClassVar[type[Options]] = DivergenceOptions
    metrics: ClassVar[type[Metrics]] = DivergenceMetrics
    trace: ClassVar[str | None] = ".divergence.npy"
    named_by: ClassVar[tuple[str, ...]] = ("data", "tokens")
    shown_options: ClassVar[tuple[str, ...] | None] = ("data", "tokens", "samples", "prompt")

    @staticmethod
    def data(options: DivergenceOptions, tokenizer: Tokenizer, directory: Path | None) -> Samples:
        """Pieces of books or of generated prose."""
        from kvbench.harness.tasks.common.samples import samples

        return samples(options, tokenizer, directory)

    @staticmethod
    def total(options: DivergenceOptions) -> int:
        """All tokens."""
        return options.samples * options.tokens

    @classmethod
    def longest(cls, options: DivergenceOptions) -> int:
        """A sample."""
        return options.tokens

    @classmethod
    def prompt_tokens(cls, options: DivergenceOptions) -> int | None:
        """The tokens of each sample that are its prompt."""
        return options.prompt

    @staticmethod
    def run(options: DivergenceOptions, job: Job) -> DivergenceMetrics:
        """Read every sample with and without the policy; the trace gets what was compared at each position."""
        from kvbench.harness.tasks.divergence.measure import measure

        return measure(options, job)

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """All figures but bytes."""
        return figures(np.load(trace, mmap_mode="r"), record.cell.task_options(DivergenceOptions).tokens)

    @classmethod
    def cached_tokens(cls, record: Record) -> tuple[int, int] | None:
        """Those between steps; if the cache is unbounded, all tokens of a sample but the last, which is never read."""
        if record.cell.capacity is not None or record.cell.evict == "prompt":
            return super().cached_tokens(record)
        return 1, record.cell.task_options(DivergenceOptions).tokens - 1

    @classmethod
    def headline(cls, record: Record) -> str:
        """KL divergence and agreement."""
        return page.headline(record)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """A row per policy, then KL divergence by position."""
        return page.body(records)

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """KL divergence and agreement, paired sample by sample."""
        return page.differences(a, b)
