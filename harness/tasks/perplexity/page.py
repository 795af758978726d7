"""The perplexity page: the whole stream, paired differences, and perplexity by position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvbench.harness.core.intervals import Interval
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Bucket, NllMetrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import cache_bytes, count, label, md, status, table
from kvbench.harness.report.pairing import (
    Common,
    common_tokens,
    describe_tokens,
    on_common,
    paired,
    past_training,
    perplexity,
    scores_all,
    stride_of,
)
from kvbench.harness.report.sections import row_label
from kvbench.harness.report.task_charts import over_the_stream
from kvbench.harness.tasks.perplexity.schema import FactCost, PerplexityMetrics, PerplexityOptions


def headline(record: Record) -> str:
    """Perplexity over all tokens that the record scored."""
    sample, metrics = "" if scores_all(record) else f" (1 token in {stride_of(record)})", record.measured(NllMetrics)
    return "" if metrics is None else f"perplexity {metrics.perplexity:.4g}{sample}"


def body(records: Sequence[Record]) -> list[str | Chart]:
    """The text, the table, the chart over the stream, and tables by position."""
    data, options = records[0].data, records[0].cell.task_options(PerplexityOptions)
    prefix, kind, common = len(data.prefix), " newlines" if options.newlines else "", common_tokens(records)
    about = (
        f"{md(options.name)} on {md(data.source or '?')}, {count(data.tokens)} tokens"
        f"{f' after a prefix of {prefix}{kind}' if prefix else ''}"
        f"{f', cut into {options.streams} streams' if options.streams else ''}."
    )
    about += "" if common.are_all else f" Perplexity is over {describe_tokens(records, common)}; bits/byte are over all tokens."
    about += _until(options, records)
    complete = [r for r in records if r.status == "ok" and scores_all(r)]
    return [
        about + "\n", *_table(records, common), *over_the_stream(records), *_not_in_chart(records, common.stride),
        *_buckets(complete), *_common_buckets(records, common), *_facts(records),
    ]  # fmt: skip


def _until(options: PerplexityOptions, records: Sequence[Record]) -> str:
    """How long cells were read, and what their intervals are corrected for."""
    if options.until is None:
        return ""
    looks = max((m.planned_looks for r in records if (m := r.measured(NllMetrics))), default=1)
    return (
        f" Each policy was read until the 95 % interval of its Δ NLL to {md(options.until.reference)} was at most "
        f"±{options.until.interval:g} nats, or to the end; intervals are corrected for {looks} planned looks."
    )


def _table(records: Sequence[Record], common: Common) -> list[str]:
    dense = next((r for r in records if r.cell.is_dense), None)
    recompute = {r.cell.capacity: r for r in records if r.cell.policy == "recompute_window"}
    on_all, may_stop = not common.are_all, any(r.metrics.tokens_read for r in records)
    head = ["policy", "capacity", *(["tokens read"] if may_stop else []), "perplexity", *(["on all tokens"] if on_all else []),
            "bits/byte", "Δ NLL to dense", "Δ NLL to recompute", "K/V", "tokens/s", "status"]  # fmt: skip
    rows = []
    for record in records:
        metrics = record.measured(NllMetrics)
        bits = metrics.bits_per_byte if metrics is not None and scores_all(record) else None
        rows.append([
            row_label(record, records), count(record.cell.capacity), *([_read(record)] if may_stop else []),
            _perplexity(on_common(record, common)),
            *([_perplexity(record) if scores_all(record) else ""] if on_all else []),
            "" if bits is None else f"{bits:.3f}",
            _difference(record, dense), _difference(record, recompute.get(record.cell.capacity)),
            "" if metrics is None else cache_bytes(metrics.kv_bytes),
            count(round(record.facts.tokens_per_second or 0)), status(record),
        ])  # fmt: skip
    return table(head, rows, "lr" + "r" * (len(head) - 3) + "l")


def _read(record: Record) -> str:
    """Tokens read, and whether the text ended before the interval was narrow enough."""
    metrics = record.measured(NllMetrics)
    if metrics is None:
        return ""
    limit = metrics.looks is not None and metrics.looks.reason == "limit reached"
    return count(record.tokens_read) + (" (limit)" if limit else "")


def _perplexity(record: Record | None) -> str:
    mean = None if record is None else perplexity(record)
    if record is None or mean is None:
        return ""
    value = f"{math.exp(min(mean.mean, 700)):.4g}"
    if past_training(record):
        return f"{value} (trend)"
    if mean.low is None or mean.high is None:
        return f"{value} (too short)"
    return f"{value} [{math.exp(mean.low):.4g}, {math.exp(mean.high):.4g}]"


def _difference(record: Record, base: Record | None) -> str:
    if base is None or base is record:
        return "" if base is None else "0"
    if past_training(base) or past_training(record):
        return "trend"
    return _signed(paired(record, base))


def _signed(difference: Interval | None) -> str:
    if difference is None:
        return ""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.4f} (too short)"
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def _not_in_chart(records: Sequence[Record], stride: int) -> list[str]:
    return [f"Not in the chart: {_recompute(records)}, which scored one token in {stride}.\n"] if stride > 1 else []


def _recompute(records: Sequence[Record]) -> str:
    """Names of the policies that scored only some tokens."""
    return md(" and ".join(dict.fromkeys(r.cell.policy for r in records if r.status == "ok" and not scores_all(r))))


def _buckets(records: Sequence[Record], which_tokens: str = "") -> list[str]:
    """Perplexity by position in the stream."""
    measured = [(r, m.buckets) for r in records if (m := r.measured(NllMetrics)) and m.buckets]
    if not measured:
        return []
    edges = sorted({_edges(b) for _, buckets in measured for b in buckets})
    rows = []
    for record, buckets in measured:
        means = {_edges(b): math.exp(min(b.nll, 700)) for b in buckets}
        rows.append([label(record), count(record.cell.capacity), *(f"{means[e]:.4g}" if e in means else "" for e in edges)])
    length = measured[0][0].facts.training_length
    about = (
        f"Perplexity by position in the stream{which_tokens}" + (f" (training length {count(length)})" if length else "") + ":\n"
    )
    head = ["policy", "capacity", *(f"{count(low)} to {count(high)}" for low, high in edges)]
    return [about, *table(head, rows, "lr" + "r" * len(edges))]


def _edges(bucket: Bucket) -> tuple[int, int]:
    return bucket.from_, bucket.to


def _common_buckets(records: Sequence[Record], common: Common) -> list[str]:
    """The same over the tokens that every row scored, folded; nothing if every row scored all tokens."""
    shared = [same for r in records if (same := on_common(r, common)) is not None] if common.stride > 1 else []
    lines = _buckets(shared, f", over {describe_tokens(records, common)}")
    return [f"<details><summary>By position, with {_recompute(records)}</summary>\n", *lines, "</details>\n"] if lines else []


def _facts(records: Sequence[Record]) -> list[str]:
    """NLL of facts in generated prose, by distance to their previous mention."""
    measured = [(r, m.facts) for r in records if (m := r.measured(PerplexityMetrics)) and m.facts]
    if not measured:
        return []
    spans = sorted({_span(f) for _, facts in measured for f in facts})
    rows = []
    for record, facts in measured:
        costs = {_span(f): f.nats for f in facts}
        rows.append([label(record), count(record.cell.capacity), *(f"{costs[s]:.2f}" if s in costs else "" for s in spans)])
    heads = ["first mention" if high == 0 else f"{low:,} to {high:,}" for low, high in spans]
    drawn = measured[0][1][0].drawn_nats
    return [
        f"NLL of a fact in nats, by words since its previous mention. A new fact is one of "
        f"{round(math.exp(drawn))}, so it costs {drawn:.2f} nats; a model that remembers it pays almost none:\n",
        *table(["policy", "capacity", *heads], rows, "lr" + "r" * len(heads)),
    ]


def _span(cost: FactCost) -> tuple[int, int]:
    """Words back, from and to; (0, 0) for a first mention."""
    low, high = cost.words_back or (0, 0)
    return low, high
