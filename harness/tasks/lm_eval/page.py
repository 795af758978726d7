"""The lm-eval page: scores by policy and task, then paired differences to dense."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvbench.harness.records import Record
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.compare import differences
from kvbench.harness.report.difference import Difference
from kvbench.harness.report.machines import row_label
from kvbench.harness.report.markdown import cache_bytes, count, md, status, table
from kvbench.harness.tasks.lm_eval.schema import LmEvalMetrics, LmEvalOptions

_PROMPTS = {
    "stream": "Prompts are read token by token, so the policy evicts before it has seen the question (query-blind).",
    "once": "Prompts are read in full, then the policy evicts once, having seen the question (query-aware). The cache holds the "
    "whole prompt until then; K/V counts what remains.",
    "truncate": "Of a prompt that is too long, the model reads the first and the last tokens, half each.",
}
_UNSEEN = "Where a prompt is cut at its end, it ends before the question, which is read afterwards: the policy has not seen it."
_EVICT_PROMPT = " Rows with evict prompt read it in full, evict once, at its end, and evict no more."


def headline(record: Record) -> str:
    """The score, and the number of questions."""
    metrics = record.measured(LmEvalMetrics)
    return "" if metrics is None else f"{metrics.metric} {_figure(metrics)} of {metrics.questions}"


def body(records: Sequence[Record]) -> list[str | Chart]:
    """Scores with standard errors, then paired differences to dense with 95 % intervals."""
    names = sorted({_column(r) for r in records})
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((row_label(record, records), count(record.cell.capacity)), {})[_column(record)] = record
    head = ["policy", "capacity", *map(md, names), "over capacity", "K/V"]
    lines = [
        [*policy, *(_score(row.get(n)) for n in names), _over_capacity(row.values()), _bytes(row.values())]
        for policy, row in rows.items()
    ]
    options = records[0].cell.task_options(LmEvalOptions)
    about = _UNSEEN if options.question else _PROMPTS[options.prompt]
    about += _EVICT_PROMPT if any(r.cell.evict == "prompt" for r in records) else ""
    intro = (
        f"lm-eval's tasks. {about} Scores are percentages with their standard errors; for whole texts, perplexities. "
        "Over capacity: share of requests longer than the capacity; only these can differ from dense.\n"
    )
    result: list[str | Chart] = [intro, *table(head, lines, "lr" + "r" * len(names) + "rr")]
    dense = next((row for row in rows.values() if all(r.cell.policy == "dense" for r in row.values())), None)
    others = [(policy, row) for policy, row in rows.items() if row is not dense]
    if dense is None or not others:
        return result
    lines = [[*policy, *(_difference(dense.get(n), row.get(n)) for n in names)] for policy, row in others]
    about = "Differences to dense, paired by question (percentage points or nats, with 95 % intervals):\n"
    return [*result, about, *table(["policy", "capacity", *map(md, names)], lines, "lr" + "r" * len(names))]


def _column(record: Record) -> str:
    """The task, with the options that differ within a section."""
    options = record.cell.task_options(LmEvalOptions)
    extra = [f"{options.num_fewshot}-shot"] if options.num_fewshot else []
    extra += [f"{options.max_seq_length:,} tokens"] if options.max_seq_length else []
    extra += [options.metric] if options.metric else []
    return options.tasks + (f" ({', '.join(extra)})" if extra else "")


def _score(record: Record | None) -> str:
    if record is None:
        return ""
    metrics = record.measured(LmEvalMetrics)
    return status(record) if metrics is None else _figure(metrics)


def _figure(metrics: LmEvalMetrics) -> str:
    """The score in percent with its standard error; for log-likelihoods, the perplexity per word or byte."""
    score, error, digits = 100.0 * metrics.score, 100.0 * (metrics.stderr or 0.0), ".1f"
    if metrics.weights is not None:
        score = math.exp(min(-metrics.score, 700.0))
        error, digits = score * error / 100, ".3g"
    return format(score, digits) + (f" ± {format(error, digits)}" if metrics.stderr is not None else "")


def _difference(base: Record | None, record: Record | None) -> str:
    """The paired difference; empty if a record is missing or failed."""
    metrics = None if record is None else record.measured(LmEvalMetrics)
    if base is None or record is None or base.status != "ok" or metrics is None:
        return ""
    difference = next((d for d in differences(base, record) if d.metric in ("accuracy", "score")), None)
    if difference is None or difference.change is None:
        return ""
    scale, digits = (1.0, "+.3f") if metrics.weights is not None else (100.0, "+.1f")
    return f"{format(scale * difference.change, digits)}{_interval(difference, scale, digits)}"


def _interval(difference: Difference, scale: float, digits: str) -> str:
    if difference.low is None or difference.high is None:
        return ""
    return f" [{format(scale * difference.low, digits)}, {format(scale * difference.high, digits)}]"


def _over_capacity(records: Iterable[Record]) -> str:
    metrics = [m for r in records if (m := r.measured(LmEvalMetrics))]
    requests = sum(m.requests for m in metrics)
    return f"{100 * sum(m.over_capacity for m in metrics) / requests:.0f} %" if requests else ""


def _bytes(records: Iterable[Record]) -> str:
    return cache_bytes(max((m.kv_bytes for r in records if (m := r.measured(LmEvalMetrics))), default=None))
