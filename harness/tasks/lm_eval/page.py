"""lm-eval's tasks: policies down, tasks across; then what each policy's scores lack to dense's, question by question."""

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
    "stream": "Prompts are taken in token by token: what is evicted is chosen before the question is read (query-blind).",
    "once": "Prompts are attended in full, and evicted once at their end, the question read (query-aware); while a prompt is "
    "read all of it is held, K/V is what stays.",
    "truncate": "Of a prompt that is too long the first and last tokens are read, half each; the rest is never seen.",
}


def headline(record: Record) -> str:
    """The score, and of how many questions."""
    metrics = record.measured(LmEvalMetrics)
    return "" if metrics is None else f"{metrics.metric} {_figure(metrics)} of {metrics.questions}"


def body(records: Sequence[Record]) -> list[str | Chart]:
    """Scores with lm-eval's standard errors, then paired differences with 95 % intervals."""
    names = sorted({_column(r) for r in records})
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((row_label(record, records), count(record.cell.capacity)), {})[_column(record)] = record
    head = ["policy", "capacity", *map(md, names), "past the cache", "K/V"]
    lines = [[*who, *(_score(row.get(n)) for n in names), _past(row.values()), _bytes(row.values())] for who, row in rows.items()]
    about = _PROMPTS[records[0].cell.task_options(LmEvalOptions).prompt]
    said = (
        f"lm-eval's tasks. {about} Scores in percent with their standard errors; of texts scored as a whole, perplexities. "
        "Past the cache: requests longer than the capacity, which alone can differ from dense.\n"
    )
    result: list[str | Chart] = [said, *table(head, lines, "lr" + "r" * len(names) + "rr")]
    dense = next((row for row in rows.values() if all(r.cell.policy == "dense" for r in row.values())), None)
    others = [(who, row) for who, row in rows.items() if row is not dense]
    if dense is None or not others:
        return result
    lines = [[*who, *(_difference(dense.get(n), row.get(n)) for n in names)] for who, row in others]
    about = "Against dense, question by question (points, or nats; 95 % intervals):\n"
    return [*result, about, *table(["policy", "capacity", *map(md, names)], lines, "lr" + "r" * len(names))]


def _column(record: Record) -> str:
    """The task, with what else may differ within a section."""
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
    """The score with its standard error: a share in percent; of log-likelihoods a word or byte, the perplexity."""
    score, error, digits = 100.0 * metrics.score, 100.0 * (metrics.stderr or 0.0), ".1f"
    if metrics.weights is not None:
        score = math.exp(min(-metrics.score, 700.0))
        error, digits = score * error / 100, ".3g"
    return format(score, digits) + (f" ± {format(error, digits)}" if metrics.stderr is not None else "")


def _difference(base: Record | None, record: Record | None) -> str:
    """Of scores, paired; empty where one is missing."""
    metrics = None if record is None else record.measured(LmEvalMetrics)
    if base is None or record is None or base.status != "ok" or metrics is None:
        return ""
    found = next((d for d in differences(base, record) if d.metric in ("accuracy", "score")), None)
    if found is None or found.change is None:
        return ""
    scale, digits = (1.0, "+.3f") if metrics.weights is not None else (100.0, "+.1f")
    return f"{format(scale * found.change, digits)}{_interval(found, scale, digits)}"


def _interval(found: Difference, scale: float, digits: str) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" [{format(scale * found.low, digits)}, {format(scale * found.high, digits)}]"


def _past(records: Iterable[Record]) -> str:
    """Share of requests that did not fit the cache, over all tasks."""
    metrics = [m for r in records if (m := r.measured(LmEvalMetrics))]
    asked = sum(m.requests for m in metrics)
    return f"{100 * sum(m.over_capacity for m in metrics) / asked:.0f} %" if asked else ""


def _bytes(records: Iterable[Record]) -> str:
    return cache_bytes(max((m.kv_bytes for r in records if (m := r.measured(LmEvalMetrics))), default=None))
