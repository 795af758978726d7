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
from kvbench.harness.report.difference import Difference, Traces, judge_interval
from kvbench.harness.report.machines import row_label
from kvbench.harness.report.markdown import cache_bytes, count, label, status, table, task_line
from kvbench.harness.tasks.divergence.schema import DivergenceMetrics, DivergenceOptions, figures, per_token
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
        m = record.measured(DivergenceMetrics)
        return "" if m is None else f"KL {m.kl:.4g} nats, top token {100 * m.agreement:.1f} % the same"

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """A row per policy, then KL divergence by position."""
        about = (
            f"{task_line(records[0])}KL divergence from dense to the policy, in nats per token: 0 where nothing has changed. "
            "Top-1 agreement: how often both find the same token most likely. With 95 % intervals:\n"
        )
        head = ["policy", "capacity", "KL", "top-1 agreement", "Δ NLL to dense", "K/V", "status"]
        return [about, *table(head, [_row(r, records) for r in records], "lrrrrrl"), *_by_position(records)]

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """KL divergence and agreement, paired sample by sample."""
        ours, theirs = a.measured(DivergenceMetrics), b.measured(DivergenceMetrics)
        if ours is None or theirs is None:
            return []
        same_samples = a.data.ids_sha256 == b.data.ids_sha256 and (ours.samples, ours.tokens) == (theirs.samples, theirs.tokens)
        result = []
        for name, x, y, less, more in (
            ("kl", ours.kl, theirs.kl, ours.sums.kl, theirs.sums.kl),
            ("agreement", ours.agreement, theirs.agreement, ours.sums.agreed, theirs.sums.agreed),
        ):
            if not same_samples:
                result.append(Difference(name, x, y, y - x, None, None, "can't tell", "different samples"))
                continue
            mean = per_token(np.array(more, np.float64) - np.array(less, np.float64), ours.tokens // ours.samples)
            verdict = judge_interval(mean.low, mean.high, _MARGINS[name], more_is_better=name == "agreement")
            why = "" if mean.low is not None else "the samples are too short for an interval"
            result.append(Difference(name, x, y, y - x, mean.low, mean.high, verdict, why))
        return result


_MARGINS = {"kl": 0.001, "agreement": 0.01}  # differences too small to matter


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    name, m = [row_label(record, records), count(record.cell.capacity)], record.measured(DivergenceMetrics)
    if m is None:
        return [*name, *[""] * 4, status(record)]
    return [
        *name, _with_ends(f"{m.kl:.4g}", m.kl_interval, "{:.4g}"),
        _with_ends(f"{100 * m.agreement:.1f} %", m.agreement_interval, "{:.1f}", 100),
        _with_ends(f"{m.nll_change:+.4f}", m.nll_change_interval, "{:+.4f}"), cache_bytes(m.kv_bytes), status(record),
    ]  # fmt: skip


def _with_ends(mean: str, ends: Sequence[float] | None, form: str, scale: float = 1) -> str:
    return f"{mean} (too short)" if ends is None else f"{mean} [{', '.join(form.format(scale * end) for end in ends)}]"


def _by_position(records: Sequence[Record]) -> list[str]:
    """KL divergence by the position of the predicted token."""
    measured = [(r, m.by_position) for r in records if (m := r.measured(DivergenceMetrics))]
    if not measured:
        return []
    edges = [(part.from_, part.to) for part in measured[0][1]]
    rows = [[label(r), count(r.cell.capacity), *(f"{part.kl:.4g}" for part in parts)] for r, parts in measured]
    head = ["policy", "capacity", *(f"{low:,} to {high:,}" for low, high in edges)]
    return ["KL divergence by position in the sample:\n", *table(head, rows, "lr" + "r" * len(edges))]
