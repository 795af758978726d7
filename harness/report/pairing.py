"""Which records may be compared, and what their difference is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import MIN_BLOCKS, Interval, clustered, interval
from kvbench.harness.records import Record

Sums = tuple[NDArray[np.float64], NDArray[np.float64]]


def question(record: Record) -> str:
    """What the record's cell shares with those it may be compared with: suite, model, task and text."""
    cell = record.cell
    parts = [cell["suite"], cell["suite_version"], cell["model"], cell["task"], record.data.get("ids_sha256", "")]
    return repr(parts)


def past_training(record: Record) -> bool:
    """Whether a cache without bound has read further than the model was trained for: then its NLL has a trend."""
    length = record.facts.get("training_length")
    return record.cell["capacity"] is None and length is not None and record.data.get("tokens", 0) > length


def perplexity(record: Record) -> Interval | None:
    """Mean NLL of the whole stream with its interval; None where the record has none."""
    if record.status != "ok" or "blocks" not in record.metrics:
        return None
    sums, tokens = _sums(record.metrics["blocks"])
    if len(record.metrics["texts"]["tokens"]) >= MIN_BLOCKS:
        return clustered(*_sums(record.metrics["texts"]))
    result = interval(sums, tokens, record.metrics["blocks"]["size"], record.cell["capacity"] or 0)
    return replace(result, low=None, high=None, p=None) if past_training(record) else result


def paired(record: Record, base: Record, trend: bool = False) -> Interval | None:
    """Mean difference in NLL to `base` in nats per token, on the tokens both scored after the larger cache filled.

    None where they can't be paired, or where one of them has a trend (then only buckets can be compared).

    Args:
        record: whose difference it is.
        base: what it is the difference to.
        trend: both have the same trend, so that it cancels: two records of one cell.
    """
    if record is base or question(record) != question(base):
        return None
    if not trend and (past_training(record) or past_training(base)):
        return None
    ours, theirs = _on_shared_tokens(record, base)
    if ours is None or theirs is None or ours["size"] != theirs["size"]:
        return None
    capacity = max(record.cell["capacity"] or 0, base.cell["capacity"] or 0)
    texts = (ours["texts"], theirs["texts"])
    if len(texts[0]["tokens"]) > MIN_BLOCKS and texts[0]["tokens"] == texts[1]["tokens"]:
        (x, n), (y, _) = _sums(texts[0]), _sums(texts[1])
        return clustered((x - y)[1:], n[1:])  # the first text is where the caches filled
    (x, n), (y, m) = _sums(ours), _sums(theirs)
    full = _after_filling(len(n), ours["size"], capacity, record)
    if not np.array_equal(n, m) or n[full].sum() == 0:
        return None
    return interval((x - y)[full], n[full], ours["size"], capacity)


def _after_filling(runs: int, size: int, capacity: int, record: Record) -> NDArray[np.bool_]:
    """Which runs of `size` positions lie wholly where a cache of this capacity is full, in each stream. [runs] bool."""
    starts = np.arange(runs) * size
    length = record.metrics.get("stream_tokens")
    if length is None:
        return starts >= capacity + 1
    place = (starts - len(record.data.get("prefix", []))) % length
    return (place >= capacity + 1) & (place + size <= length)


def _on_shared_tokens(record: Record, base: Record) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Block sums over tokens that both scored: all, or every stride-th."""
    if record.status != "ok" or base.status != "ok" or "blocks" not in record.metrics or "blocks" not in base.metrics:
        return None, None
    if record.metrics["blocks"]["tokens"] == base.metrics["blocks"]["tokens"]:
        return tuple(r.metrics["blocks"] | {"texts": r.metrics["texts"]} for r in (record, base))  # type: ignore[return-value]
    return record.metrics.get("on_stride"), base.metrics.get("on_stride")


def _sums(blocks: dict[str, Any]) -> Sums:
    return np.array(blocks["nll_sum"], np.float64), np.array(blocks["tokens"], np.float64)
