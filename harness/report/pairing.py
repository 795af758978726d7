"""Which records can be compared, and their paired difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import MIN_BLOCKS, Interval, clustered, interval
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, StrideBlocks, Sums


def question(record: Record) -> str:
    """Suite, model, task and text; records that agree in them are comparable."""
    cell = record.cell.as_json()
    parts = [cell["suite"], cell["suite_version"], cell["model"], cell["task"], record.data.ids_sha256]
    return repr(parts)


def past_training(record: Record) -> bool:
    """Whether an unbounded cache was read past the model's training length, so that its NLL has a trend."""
    length = record.facts.training_length
    return record.cell.capacity is None and length is not None and record.data.tokens > length


def perplexity(record: Record) -> Interval | None:
    """Mean NLL of the whole stream with its interval; None if not measured."""
    metrics = record.measured(NllMetrics)
    if metrics is None:
        return None
    if len(metrics.texts.tokens) >= MIN_BLOCKS:
        return clustered(*_sums(metrics.texts))
    result = interval(*_sums(metrics.blocks), metrics.blocks.size, record.cell.capacity or 0)
    return replace(result, low=None, high=None, p=None) if past_training(record) else result


def paired(record: Record, base: Record, trend: bool = False) -> Interval | None:
    """Mean NLL of `record` minus that of `base` in nats per token, on tokens that both scored after the larger cache filled.

    None if they can't be paired, or if one has a trend (then only buckets can be compared).

    Args:
        record: minuend.
        base: subtrahend.
        trend: both have the same trend, which cancels: they are records of one cell.
    """
    if record is base or question(record) != question(base):
        return None
    if not trend and (past_training(record) or past_training(base)):
        return None
    ours, theirs = record.measured(NllMetrics), base.measured(NllMetrics)
    if ours is None or theirs is None:
        return None
    a, b = _on_shared_tokens(ours, theirs)
    if a is None or b is None or a.size != b.size:
        return None
    capacity = max(record.cell.capacity or 0, base.cell.capacity or 0)
    if len(a.texts.tokens) > MIN_BLOCKS and a.texts.tokens == b.texts.tokens:
        (x, n), (y, _) = _sums(a.texts), _sums(b.texts)
        return clustered((x - y)[1:], n[1:])  # the first text is where the caches filled
    (x, n), (y, m) = _sums(a), _sums(b)
    full = _after_filling(len(n), a.size, capacity, ours.stream_tokens, len(record.data.prefix))
    if not np.array_equal(n, m) or n[full].sum() == 0:
        return None
    return interval((x - y)[full], n[full], a.size, capacity)


def _after_filling(runs: int, size: int, capacity: int, stream_tokens: int | None, prefix: int) -> NDArray[np.bool_]:
    """Which runs of `size` positions lie entirely after the cache has filled, in each stream. [runs] bool."""
    starts = np.arange(runs) * size
    if stream_tokens is None:
        return starts >= capacity + 1
    position = (starts - prefix) % stream_tokens
    return (position >= capacity + 1) & (position + size <= stream_tokens)


def _on_shared_tokens(a: NllMetrics, b: NllMetrics) -> tuple[StrideBlocks | None, StrideBlocks | None]:
    """Block sums over the tokens that both scored: all, or every `stride`-th."""
    if a.blocks.tokens == b.blocks.tokens:
        return on_all_tokens(a), on_all_tokens(b)
    return a.on_stride, b.on_stride


def on_all_tokens(metrics: NllMetrics) -> StrideBlocks:
    """Block sums over all tokens, with the sums of each text."""
    blocks = metrics.blocks
    return StrideBlocks.model_construct(nll_sum=blocks.nll_sum, tokens=blocks.tokens, size=blocks.size, texts=metrics.texts)


def _sums(blocks: Sums) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array(blocks.nll_sum, np.float64), np.array(blocks.tokens, np.float64)
