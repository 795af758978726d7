"""What went wrong with a policy, in words: failures, flags, and where its perplexity falls off a cliff."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.pairing import past_training, question
from kvbench.harness.report.rows import Row

_CLIFF = math.log(2)  # nats: twice the perplexity
_STRETCH = 4  # runs of tokens that a cliff has at least


def faults(row: Row, others: Sequence[Row]) -> list[str]:
    """What went wrong: failures by their kind, flags, and the token from which on perplexity is twice that of the best."""
    found = []
    for record in row.records:
        if record.status != "ok":
            error = record.error
            message = "" if error is None else error.message
            what = f"NaN: {message}" if "not finite" in message else "failed" if error is None else error.kind
            found.append(f"{record.cell.task.name} failed: {what}")
        found += record.metrics.flags
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
    mine, best_figures = record.measured(NllMetrics), best.perplexity.measured(NllMetrics)
    if mine is None or best_figures is None:
        return None
    ours, theirs = mine.blocks, best_figures.blocks
    if ours.tokens != theirs.tokens or len(ours.tokens) <= 2 * _STRETCH:
        return None
    tokens = np.array(ours.tokens, np.float64)
    off = np.array(ours.nll_sum) - np.array(theirs.nll_sum)
    if off[-_STRETCH:].sum() <= _CLIFF * tokens[-_STRETCH:].sum():
        return None  # it does not last
    for start in range(len(off) - _STRETCH):
        means = np.cumsum(off[start:]) / np.maximum(np.cumsum(tokens[start:]), 1)
        if means[_STRETCH:].min() > _CLIFF:
            first = start + int(np.argmax(off[start:] > _CLIFF * tokens[start:]))
            return first * ours.size
    return None
