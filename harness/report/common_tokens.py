"""The tokens that every perplexity of a column is over.

A policy that recomputes its window may score only every `stride`-th token. The others score all tokens and also record
their sums over every `stride`-th (`on_stride`), so that one column can compare both. Where cells stop as soon as their interval
is narrow (`until`), a column is over the beginning of the text that all of them read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import Blocks, Bucket, NllMetrics, StrideBlocks
from kvbench.harness.report.pairing import on_all_tokens, on_stride

_FIRST_BUCKET = 256  # positions


class Common(NamedTuple):
    """The tokens that every one of some records scored.

    Attributes:
        stride: distance between them.
        read: they are among the first `read` tokens of the text; None: all of it, or all that was read of it.
    """

    stride: int = 1
    read: int | None = None

    @property
    def are_all(self) -> bool:
        """Whether each of the records scored nothing but these."""
        return self == Common()


def scores_all(record: Record) -> bool:
    """Whether a record has the NLL of every token, not only of every `stride`-th."""
    metrics = record.measured(NllMetrics)
    return metrics is None or metrics.on_stride is None or metrics.on_stride.tokens != metrics.blocks.tokens


def stride_of(record: Record) -> int:
    """Distance between the tokens that are scored when the window is recomputed."""
    return int(record.cell.options.get("stride", 1))


def common_tokens(records: Sequence[Record]) -> Common:
    """The tokens that all records scored."""
    scored = [r for r in records if r.measured(NllMetrics)]
    read = {r.tokens_read for r in scored} if any(r.metrics.tokens_read for r in scored) else set()
    stride = next((stride_of(r) for r in scored if not scores_all(r)), 1)
    return Common(stride, min(read) if len(read) > 1 else None)


def on_common(record: Record, common: Common) -> Record | None:
    """The record as if it had scored only these tokens; None if it failed or has no sums over them."""
    if record.status != "ok":
        return None
    if common.are_all:
        return record
    metrics = record.measured(NllMetrics)
    sums_over = on_all_tokens if common.stride == 1 else on_stride
    shared = None if metrics is None else sums_over(metrics, len(record.data.prefix), common.read)
    if metrics is None or shared is None:
        return None
    tokens = sum(shared.tokens)
    nll = sum(shared.nll_sum) / tokens
    blocks = Blocks.model_construct(nll_sum=shared.nll_sum, tokens=shared.tokens, size=shared.size)
    figures = NllMetrics.model_construct(
        tokens=tokens, nll=nll, perplexity=math.exp(min(nll, 700.0)), blocks=blocks, texts=shared.texts, on_stride=shared,
        buckets=_buckets(metrics, shared), stream_tokens=metrics.stream_tokens, kv_bytes=metrics.kv_bytes,
        state_bytes=metrics.state_bytes, flags=metrics.flags, tokens_read=metrics.tokens_read, looks=metrics.looks,
    )  # fmt: skip
    return replace(record, metrics=figures)


def common_perplexity(record: Record, common: Common) -> float | None:
    """Perplexity over these tokens; None if not measured."""
    shared = on_common(record, common)
    metrics = None if shared is None else shared.measured(NllMetrics)
    return None if metrics is None else metrics.perplexity


def describe_tokens(records: Sequence[Record], common: Common) -> str:
    """In words, the tokens that every row is over."""
    if common.read is not None:
        return f"the first {common.read:,} tokens, which every row read" + (f", one in {common.stride}" * (common.stride > 1))
    scored = next((m.on_stride for r in records if (m := r.measured(NllMetrics)) and not scores_all(r)), None)
    if scored is None:
        return "all tokens"
    return f"the {sum(scored.tokens):,} tokens that every row scored, one in {common.stride}"


def _buckets(metrics: NllMetrics, shared: StrideBlocks) -> list[Bucket]:
    """Mean NLL by position, bucket ends doubling; none for several streams, whose blocks span different positions."""
    if metrics.stream_tokens is not None or not metrics.buckets:
        return []
    size, end = shared.size, min(metrics.buckets[-1].to, len(shared.tokens) * shared.size)
    low, high, buckets = 0, max(_FIRST_BUCKET, size), []
    while low < end:
        runs = slice(low // size, high // size)
        tokens = sum(shared.tokens[runs])
        if tokens:
            mean = sum(shared.nll_sum[runs]) / tokens
            buckets.append(Bucket.model_construct(from_=low, to=min(high, end), tokens=tokens, nll=mean))
        low, high = high, 2 * high
    return buckets
