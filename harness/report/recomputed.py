"""Figures of a record that follow from others in it: bits per byte, K/V bytes, shares, rooflines, speed. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.harness.records import Record

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


def of_record(record: Record) -> Iterator[Figure]:
    """All that follows from the record alone."""
    metrics = record.metrics
    own = _TASKS.get(str(record.cell["task"].get("name")))
    for name, again in own(record) if own else ():
        yield Figure(name, _at(metrics, name), again)
    expected = kv_bytes(record)
    if expected is not None:
        yield Figure("kv_bytes", metrics.get("kv_bytes"), expected)
    seconds, tokens = record.facts.get("measured_seconds"), record.data.get("tokens")
    if seconds and tokens and "tokens_per_second" in record.facts:
        speed = tokens / seconds
        off = 0.05 + speed * 0.0005 / seconds  # the speed is rounded to a tenth, the seconds to a thousandth
        yield Figure("facts.tokens_per_second", record.facts["tokens_per_second"], speed, 1.01 * off)


def kv_bytes(record: Record) -> int | None:
    """What K and V of the cell take, in bytes, by the shapes of the model's layers; None where the record does not tell.

    A bounded cache has one slot more than its capacity; one without bound as many whole buckets as it has read tokens. A
    sliding-window layer keeps no more than its window.
    """
    cell, shapes = record.cell, record.facts.get("kv_shapes")
    if cell["policy"] in _AFRESH or record.facts.get("method") == "windows run afresh":
        return 0
    item = _ITEM_BYTES.get(cell["model"]["dtype"])
    streams, slots = _streams(cell["task"]), _slots(record)
    if shapes is None or item is None or slots is None:
        return None
    return streams * sum(
        s["layers"] * s["heads"] * (s["key_dim"] + s["value_dim"]) * item * min(slots, s["sliding_window"] or slots)
        for s in shapes
    )


def _slots(record: Record) -> int | None:
    """Slots of a layer without sliding window; None where it depends on what was answered, or on how much was reserved."""
    cell, task = record.cell, record.cell["task"]
    if task.get("name") == "lm_eval" and task.get("prompt") != "stream":  # what stays of a prompt is another count
        return None
    if cell["capacity"] is not None:
        return int(cell["capacity"]) + 1
    read = {
        "perplexity": lambda: len(record.data["prefix"]) + record.data["tokens"] // _streams(task) - 1,
        "memory": lambda: task["tokens"],
    }.get(str(task.get("name")))
    return None if read is None else max(1, -(-read() // _BUCKET)) * _BUCKET


def _streams(task: dict[str, Any]) -> int:
    """Streams that a cache holds side by side."""
    option = {"perplexity": "streams", "latency": "batch", "memory": "batch"}.get(str(task.get("name")), "")
    return int(task.get(option) or 1)


def _perplexity(record: Record) -> Iterator[tuple[str, Any]]:
    m = record.metrics
    yield "perplexity", math.exp(min(m["nll"], 700.0))
    if "bytes" in m:
        yield "bits_per_byte", m["nll"] * m["tokens"] / math.log(2) / max(1, m["bytes"])


def _questions(record: Record) -> Iterator[tuple[str, Any]]:
    m = record.metrics
    if "right" in m:
        yield "accuracy", m["right"] / m["questions"]
        yield "right", m["outcomes"].count("1")
    if "accuracy" in m and "score" in m:
        yield "score", m["accuracy"]


def _latency(record: Record) -> Iterator[tuple[str, Any]]:
    m = record.metrics
    if "roofline" not in m:
        return
    bound, rates = m["roofline"], m["device"]
    yield "roofline.ms", 1e3 * max(bound["bytes"] / rates["bandwidth"], bound["operations"] / rates["multiply_rate"])
    yield "over_roofline", m["step_ms"] / bound["ms"]


def _memory(record: Record) -> Iterator[tuple[str, Any]]:
    m = record.metrics
    curve, capacity = m["curve"], record.cell["capacity"] or 0
    filled = next((point for point in curve if point["position"] > capacity), curve[-1])
    yield "peak_bytes", curve[-1]["peak_bytes"]
    yield "growth_bytes", curve[-1]["peak_bytes"] - filled["peak_bytes"]
    expected = kv_bytes(record)
    if expected is not None:
        yield "expected_kv_bytes", expected


_TASKS: dict[str, Callable[[Record], Iterator[tuple[str, Any]]]] = {
    "perplexity": _perplexity, "streameval": _questions, "arc_stream": _questions, "lm_eval": _questions,
    "latency": _latency, "memory": _memory,
}  # fmt: skip


def _at(metrics: dict[str, Any], name: str) -> Any:
    """A figure by its name, with dots between the parts."""
    value: Any = metrics
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
