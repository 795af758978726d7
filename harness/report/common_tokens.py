"""The tokens that every perplexity of a column is over.

A policy that recomputes its window may score only every `stride`-th token. The others score all tokens and also record
their sums over every `stride`-th (`on_stride`), so that one column can compare both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Blocks, Bucket, NllMetrics, StrideBlocks
from kvbench.harness.report.pairing import question

_FIRST_BUCKET = 256  # positions


def scores_all(record: Record) -> bool:
    """Whether a record has the NLL of every token, not only of every `stride`-th."""
    metrics = record.measured(NllMetrics)
    return metrics is None or metrics.on_stride is None or metrics.on_stride.tokens != metrics.blocks.tokens


def stride_of(record: Record) -> int:
    """Distance between the tokens that are scored when the window is recomputed."""
    return int(record.cell.options.get("stride", 1))


def common_stride(records: Sequence[Record]) -> int:
    """Distance between the tokens that all records scored; 1 if each scored every token."""
    return next((stride_of(r) for r in records if r.status == "ok" and not scores_all(r)), 1)


def on_common(record: Record, stride: int) -> Record | None:
    """The record as if it had scored only every `stride`-th token; None if it failed or has no sums over them."""
    if record.status != "ok":
        return None
    if stride == 1:
        return record
    metrics = record.measured(NllMetrics)
    if metrics is None or metrics.on_stride is None:
        return None
    shared = metrics.on_stride
    tokens = sum(shared.tokens)
    nll = sum(shared.nll_sum) / tokens
    blocks = Blocks.model_construct(nll_sum=shared.nll_sum, tokens=shared.tokens, size=shared.size)
    figures = NllMetrics.model_construct(
        tokens=tokens, nll=nll, perplexity=math.exp(min(nll, 700.0)), blocks=blocks, texts=shared.texts, on_stride=shared,
        buckets=_buckets(metrics, shared), stream_tokens=metrics.stream_tokens, kv_bytes=metrics.kv_bytes,
        state_bytes=metrics.state_bytes, flags=metrics.flags,
    )  # fmt: skip
    return replace(record, metrics=figures)


def common_perplexity(record: Record, records: Sequence[Record]) -> float | None:
    """Perplexity over the tokens scored by all records of the same question; None if not measured."""
    rivals = [r for r in records if question(r) == question(record)]
    common = on_common(record, common_stride(rivals))
    metrics = None if common is None else common.measured(NllMetrics)
    return None if metrics is None else metrics.perplexity


def describe_tokens(records: Sequence[Record], stride: int) -> str:
    """In words, the tokens that every row is over."""
    scored = next((m.on_stride for r in records if (m := r.measured(NllMetrics)) and not scores_all(r)), None)
    if scored is None:
        return "all tokens"
    return f"the {sum(scored.tokens):,} tokens that every row scored, one in {stride}"


def _buckets(metrics: NllMetrics, shared: StrideBlocks) -> list[Bucket]:
    """Mean NLL by position, bucket ends doubling; none for several streams, whose blocks span different positions."""
    if metrics.stream_tokens is not None or not metrics.buckets:
        return []
    size, end = shared.size, metrics.buckets[-1].to
    low, high, buckets = 0, max(_FIRST_BUCKET, size), []
    while low < end:
        runs = slice(low // size, high // size)
        tokens = sum(shared.tokens[runs])
        if tokens:
            mean = sum(shared.nll_sum[runs]) / tokens
            buckets.append(Bucket.model_construct(from_=low, to=min(high, end), tokens=tokens, nll=mean))
        low, high = high, 2 * high
    return buckets
