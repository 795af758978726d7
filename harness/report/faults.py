"""What went wrong with a policy, in words: failures, flags, and where its perplexity falls off a cliff."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvbench.harness.report.pairing import past_training, question
from kvbench.harness.report.rows import Row

_CLIFF = math.log(2)  # nats: twice the perplexity
_STRETCH = 4  # runs of tokens that a cliff has at least


def faults(row: Row, others: Sequence[Row]) -> list[str]:
    """What went wrong: failures by their kind, flags, and the token from which on perplexity is twice that of the best."""
    found = []
    for record in row.records:
        if record.status != "ok":
            error = record.error or {}
            what = (
                f"NaN: {error.get('message')}" if "not finite" in str(error.get("message")) else str(error.get("kind", "failed"))
            )
            found.append(f"{record.cell['task'].get('name')} failed: {what}")
        found += [str(flag) for flag in record.metrics.get("flags") or []]
    at = cliff(row, others)
    return [*dict.fromkeys(found), *([f"cliff at token {at:,}"] if at is not None else [])]


def cliff(row: Row, others: Sequence[Row]) -> int | None:
    """The token from which on this has more than twice the perplexity of the best with a bounded cache; None if there is none.

    The first from which the mean difference stays above that, however far one reads on.
    """
    record = row.perplexity
    bounded = [
        r
        for r in others
        if r is not row and r.nll is not None and r.kv_bytes and r.perplexity and not past_training(r.perplexity)
    ]
    best = min(bounded, key=lambda r: r.nll or math.inf, default=None)
    if (
        record is None
        or record.status != "ok"
        or best is None
        or best.perplexity is None
        or question(record) != question(best.perplexity)
    ):
        return None
    ours, theirs = record.metrics.get("blocks"), best.perplexity.metrics.get("blocks")
    if not ours or not theirs or ours["tokens"] != theirs["tokens"] or len(ours["tokens"]) <= 2 * _STRETCH:
        return None
    tokens = np.array(ours["tokens"], np.float64)
    off = np.array(ours["nll_sum"]) - np.array(theirs["nll_sum"])
    if off[-_STRETCH:].sum() <= _CLIFF * tokens[-_STRETCH:].sum():
        return None  # it does not last
    for start in range(len(off) - _STRETCH):
        means = np.cumsum(off[start:]) / np.maximum(np.cumsum(tokens[start:]), 1)
        if means[_STRETCH:].min() > _CLIFF:
            first = start + int(np.argmax(off[start:] > _CLIFF * tokens[start:]))
            return first * int(ours["size"])
    return None
