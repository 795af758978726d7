"""Which tokens a column of perplexities is over: the same in every row.

A policy that recomputes its window may score only every `stride`-th token. The others score all tokens, and keep their
sums over every `stride`-th beside them (`on_stride`), so that both can stand in one column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.pairing import question

_FIRST_BUCKET = 256  # positions


def scores_all(record: Record) -> bool:
    """Whether a record has the NLL of every token, not only of every `stride`-th."""
    shared = record.metrics.get("on_stride")
    return shared is None or shared["tokens"] != record.metrics["blocks"]["tokens"]


def common_stride(records: Sequence[Record]) -> int:
    """Distance between the tokens that all of these records scored: 1 where each scored every token."""
    return next((int(r.cell["task"]["stride"]) for r in records if r.status == "ok" and not scores_all(r)), 1)


def on_common(record: Record, stride: int) -> Record | None:
    """The record as if it had scored only every `stride`-th token; itself where `stride` is 1.

    None where it failed, or kept no sums over these tokens.
    """
    if record.status != "ok":
        return None
    if stride == 1:
        return record
    shared = record.metrics.get("on_stride")
    if shared is None or not sum(shared["tokens"]):
        return None
    tokens = sum(shared["tokens"])
    nll = sum(shared["nll_sum"]) / tokens
    figures = {
        "tokens": tokens, "nll": nll, "perplexity": math.exp(min(nll, 700.0)),
        "blocks": {k: shared[k] for k in ("nll_sum", "tokens", "size")}, "texts": shared["texts"],
        "buckets": _buckets(record, shared),
    }  # fmt: skip
    return replace(record, metrics={k: v for k, v in record.metrics.items() if k != "bits_per_byte"} | figures)


def common_perplexity(record: Record, records: Sequence[Record]) -> float | None:
    """On the tokens that all of these scored that answer the record's question; None where it has none."""
    rivals = [r for r in records if question(r) == question(record)]
    seen = on_common(record, common_stride(rivals))
    return None if seen is None else seen.metrics.get("perplexity")


def described(records: Sequence[Record], stride: int) -> str:
    """In words, which tokens every row is over."""
    scored = next((r for r in records if not scores_all(r)), None)
    if scored is None:
        return "all tokens"
    return f"the {sum(scored.metrics['on_stride']['tokens']):,} tokens that every row scored, one in {stride}"


def _buckets(record: Record, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean NLL by position, each bucket twice as long as all before it; none for several streams, whose runs don't line up."""
    if "stream_tokens" in record.metrics or not record.metrics.get("buckets"):
        return []
    size, end = shared["size"], record.metrics["buckets"][-1]["to"]
    low, high, found = 0, max(_FIRST_BUCKET, size), []
    while low < end:
        runs = slice(low // size, high // size)
        tokens = sum(shared["tokens"][runs])
        if tokens:
            found.append({"from": low, "to": min(high, end), "tokens": tokens, "nll": sum(shared["nll_sum"][runs]) / tokens})
        low, high = high, 2 * high
    return found
