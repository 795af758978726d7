"""Figures that follow from others of the same record: bits per byte, K/V bytes, shares, rooflines, speed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.harness.core.evict import at_once
from kvbench.harness.records import Record
from kvbench.harness.report.task import task_of

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BUCKET_SLOTS = 256  # an unbounded cache grows by this many
_SECONDS_ROUNDING, _SPEED_ROUNDING = 0.0005, 0.05  # seconds are recorded to 0.001, a speed to 0.1
CACHELESS = ("recompute_window", "recompute_sink_window")


@dataclass(frozen=True)
class Figure:
    """A recorded figure and its recomputed value.

    Attributes:
        name: of a metric, or "facts." and the name of a fact.
        recorded: None if the record lacks it.
        expected: recomputed value.
        tolerance: absolute; above 0 if its inputs were rounded.
    """

    name: str
    recorded: Any
    expected: Any
    tolerance: float = 0.0


def figures_from_record(record: Record) -> Iterator[Figure]:
    """Recompute all figures that need no trace."""
    metrics = record.metrics.as_json()
    for name, expected in task_of(record).derived(record):
        yield Figure(name, _lookup(metrics, name), expected)
    size = kv_bytes(record)
    if size is not None and "kv_bytes" in metrics:
        yield Figure("kv_bytes", metrics["kv_bytes"], size)
    seconds, tokens, recorded = record.facts.measured_seconds, record.tokens_read, record.facts.tokens_per_second
    if seconds and tokens and recorded is not None and seconds > _SECONDS_ROUNDING:
        speed = tokens / seconds
        rounding = _SPEED_ROUNDING + tokens / (seconds - _SECONDS_ROUNDING) - speed
        yield Figure("facts.tokens_per_second", recorded, speed, 1.01 * rounding)


def kv_bytes(record: Record) -> int | None:
    """Bytes of K and V, from the shapes of the model's layers; None if the record lacks them.

    A bounded cache has one slot more than its capacity. An unbounded one has whole buckets of slots for the tokens it read.
    A sliding-window layer keeps no more than its window. Where a prompt was cut, or budgets differ, the slots are unknown.
    """
    cell, shapes, codec = record.cell, record.facts.kv_shapes, record.cell.codec
    if record.facts.budgets or record.facts.code:  # heads hold different numbers of tokens, or only its code knows how many
        return None
    if cell.policy in CACHELESS or record.facts.method == "windows run afresh":
        return 0
    item, held = _ITEM_BYTES.get(cell.model.dtype), task_of(record).cached_tokens(record)
    if shapes is None or item is None or held is None:
        return None
    streams, tokens = held
    slots = tokens + 1 if cell.capacity is not None else whole_buckets(tokens)
    spare = at_once(cell.moment) - 1
    total = 0
    for s in shapes:
        each = min(slots, (s.sliding_window or slots) + spare)
        plain = each * (s.key_dim + s.value_dim) * item
        total += s.layers * s.heads * (plain if codec is None else codec.allocated(each, s.key_dim, s.value_dim, item))
    return streams * total


def whole_buckets(tokens: int) -> int:
    """Slots of an unbounded cache that holds this many tokens."""
    return max(1, -(-tokens // _BUCKET_SLOTS)) * _BUCKET_SLOTS


def _lookup(metrics: dict[str, Any], name: str) -> Any:
    """A figure by its dotted name."""
    value: Any = metrics
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
