"""Figures of a record that follow from others in it: bits per byte, K/V bytes, shares, rooflines, speed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.task import task_of

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BUCKET = 256  # slots; a cache without bound grows by so many
_AFRESH = ("recompute_window", "recompute_sink_window")  # keep no K and V between steps


@dataclass(frozen=True)
class Figure:
    """A figure as the record has it, and as it follows from the rest.

    Attributes:
        name: in the record; of metrics, or "facts." and a name.
        recorded: None where the record lacks it.
        again: what it should be.
        within: absolute tolerance, where what it follows from was rounded.
    """

    name: str
    recorded: Any
    again: Any
    within: float = 0.0


def figures_from_record(record: Record) -> Iterator[Figure]:
    """All that follows from the record alone."""
    metrics = record.metrics.as_json()
    for name, again in task_of(record).derived(record):
        yield Figure(name, _at(metrics, name), again)
    expected = kv_bytes(record)
    if expected is not None and "kv_bytes" in metrics:
        yield Figure("kv_bytes", metrics["kv_bytes"], expected)
    seconds, tokens, recorded = record.facts.measured_seconds, record.data.tokens, record.facts.tokens_per_second
    if seconds and tokens and recorded is not None:
        speed = tokens / seconds
        off = 0.05 + speed * 0.0005 / seconds  # the speed is rounded to a tenth, the seconds to a thousandth
        yield Figure("facts.tokens_per_second", recorded, speed, 1.01 * off)


def kv_bytes(record: Record) -> int | None:
    """What K and V of the cell take, in bytes, by the shapes of the model's layers; None where the record does not tell.

    A bounded cache has one slot more than its capacity; one without bound as many whole buckets as it has read tokens. A
    sliding-window layer keeps no more than its window.
    """
    cell, shapes = record.cell, record.facts.kv_shapes
    if cell.policy in _AFRESH or record.facts.method == "windows run afresh":
        return 0
    item, held = _ITEM_BYTES.get(cell.model.dtype), task_of(record).cached_tokens(record)
    if shapes is None or item is None or held is None:
        return None
    streams, tokens = held
    slots = tokens + 1 if cell.capacity is not None else whole_buckets(tokens)
    return streams * sum(
        s.layers * s.heads * (s.key_dim + s.value_dim) * item * min(slots, s.sliding_window or slots) for s in shapes
    )


def whole_buckets(tokens: int) -> int:
    """Slots of a cache without bound that has read so many tokens."""
    return max(1, -(-tokens // _BUCKET)) * _BUCKET


def _at(metrics: dict[str, Any], name: str) -> Any:
    """A figure by its name, with dots between the parts."""
    value: Any = metrics
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
