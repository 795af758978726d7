"""What went wrong with a policy, in words: failures, flags, and cliffs in perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.pairing import past_training, question
from kvbench.harness.report.rows import Row

_CLIFF_NATS = math.log(2)  # twice the perplexity
_MIN_CLIFF_BLOCKS = 4

Floats = NDArray[np.float64]


def faults(row: Row, others: Sequence[Row]) -> list[str]:
    """Failures by kind, flags, and the token where a cliff begins."""
    problems = []
    for record in row.records:
        if record.status != "ok":
            error = record.error
            message = "" if error is None else error.message
            reason = f"NaN: {message}" if "not finite" in message else "failed" if error is None else error.kind
            problems.append(f"{record.cell.task.name} failed: {reason}")
        problems += record.metrics.flags
    at = cliff(row, others)
    return [*dict.fromkeys(problems), *([f"cliff at token {at:,}"] if at is not None else [])]


def cliff(row: Row, others: Sequence[Row]) -> int | None:
    """The first token from which on perplexity stays above twice that of the best bounded cache; None if there is none.

    From that token on, the mean NLL difference exceeds log 2 over every stretch of more than `_MIN_CLIFF_BLOCKS` blocks.
    """
    best = _best_bounded(row, others)
    blocks = None if best is None or row.perplexity is None else _paired_blocks(row.perplexity, best)
    if blocks is None:
        return None
    excess, tokens, size = blocks
    if excess[-_MIN_CLIFF_BLOCKS:].sum() <= _CLIFF_NATS * tokens[-_MIN_CLIFF_BLOCKS:].sum():
        return None  # it ends before the stream does
    for start in range(len(excess) - _MIN_CLIFF_BLOCKS):
        means = np.cumsum(excess[start:]) / np.maximum(np.cumsum(tokens[start:]), 1)
        if means[_MIN_CLIFF_BLOCKS:].min() > _CLIFF_NATS:
            return size * (start + int(np.argmax(excess[start:] > _CLIFF_NATS * tokens[start:])))
    return None


def _best_bounded(row: Row, others: Sequence[Row]) -> Record | None:
    """The perplexity record of the best other cache that is bounded, or was not read past its training length."""
    scored = [r for r in others if r is not row and r.nll is not None and r.kv_bytes]
    rivals = [r for r in scored if r.perplexity is not None and not past_training(r.perplexity)]
    best = min(rivals, key=lambda r: r.nll or math.inf, default=None)
    return None if best is None else best.perplexity


def _paired_blocks(a: Record, b: Record) -> tuple[Floats, Floats, int] | None:
    """(NLL of a minus b, tokens) of each block, and the block size; None unless both scored the same long enough text."""
    if question(a) != question(b):
        return None
    ours, theirs = a.measured(NllMetrics), b.measured(NllMetrics)
    if ours is None or theirs is None or ours.blocks.tokens != theirs.blocks.tokens:
        return None
    if len(ours.blocks.tokens) <= 2 * _MIN_CLIFF_BLOCKS:
        return None
    excess = np.array(ours.blocks.nll_sum) - np.array(theirs.blocks.nll_sum)
    return excess, np.array(ours.blocks.tokens, np.float64), ours.blocks.size
