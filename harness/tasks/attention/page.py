"""The attention page: sinks, curves over layers, what policies lose, and the tokens that stand out."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.machines import row_label
from kvbench.harness.report.markdown import count, md, number, percent, status, table, task_line
from kvbench.harness.tasks.attention import chart
from kvbench.harness.tasks.attention.patches_page import patches_of
from kvbench.harness.tasks.attention.schema import AttentionMetrics, AttentionOptions

_FIGURES = ("sink heads", "first token", "no token", "entropy", "largest logit", "largest activation", "lost")
_SHOWN = 8  # other sinks, and massive activations


def headline(record: Record) -> str:
    """The sink metric, and what was lost."""
    metrics = record.measured(AttentionMetrics)
    if metrics is None:
        return ""
    lost = "" if metrics.lost is None else f", {100 * metrics.lost:.1f} % of attention lost"
    outliers = "" if metrics.patches is None else f", {100 * metrics.patches.outliers:.1f} % of patches outliers"
    return f"first token a sink of {100 * metrics.sink_heads:.0f} % of heads{lost}{outliers}"


def body(records: Sequence[Record]) -> list[str | Chart]:
    """A row per policy, then charts, then what stands out under full attention."""
    measured = [r for r in records if r.measured(AttentionMetrics)]
    epsilon = records[0].cell.task_options(AttentionOptions).epsilon
    about = (
        f"{task_line(records[0])}A head's sink gets more than {epsilon:g} of its attention, mean over queries. Attention lost is "
        "what full attention would have given to tokens that were evicted before. With 95 % intervals over samples:\n"
    )
    rows = [_row(record, records) for record in records]
    head, alignment = ["policy", "capacity", *_FIGURES, "status"], "lr" + "r" * len(_FIGURES) + "l"
    lines: list[str | Chart] = [about, *table(head, rows, alignment)]
    if measured:
        full = [r for r in measured if r.cell.policy == "dense"][:1]
        lines += [
            *map(chart.heads, full),
            chart.over_layers(measured),
            *(line for r in full for line in (*patches_of(r), *_outstanding(r))),
        ]
    return lines


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
    found = [
        "Other sinks under full attention: " + ("; ".join(sinks) if sinks else "none") + ".",
        "Massive activations (over 100 and 1,000 times the median of their layer): "
        + ("; ".join(massive) if massive else "none") + ".",
    ]  # fmt: skip
    return ["\n\n".join(found) + "\n"]
