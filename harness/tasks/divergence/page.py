"""The divergence page: how far each policy moves predictions, in all and by position; and how two records are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.difference import Difference, judge_interval
from kvbench.harness.report.machines import row_label
from kvbench.harness.report.markdown import cache_bytes, count, label, status, table, task_line
from kvbench.harness.tasks.divergence.figures import per_token
from kvbench.harness.tasks.divergence.schema import DivergenceMetrics

_MARGINS = {"kl": 0.001, "agreement": 0.01}  # differences too small to matter


def headline(record: Record) -> str:
    """KL divergence and agreement."""
    m = record.measured(DivergenceMetrics)
    return "" if m is None else f"KL {m.kl:.4g} nats, top token {100 * m.agreement:.1f} % the same"


def body(records: Sequence[Record]) -> list[str | Chart]:
    """A row per policy, then KL divergence by position."""
    about = (
        f"{task_line(records[0])}KL divergence from dense to the policy, in nats per token: 0 where nothing has changed. Top-1 "
        "agreement: how often both find the same token most likely. With 95 % intervals:\n"
    )
    head = ["policy", "capacity", "KL", "top-1 agreement", "Δ NLL to dense", "K/V", "status"]
    return [about, *table(head, [_row(r, records) for r in records], "lrrrrrl"), *_by_position(records)]


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


def differences(a: Record, b: Record) -> list[Difference]:
    """KL divergence and agreement of two records, paired sample by sample."""
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
