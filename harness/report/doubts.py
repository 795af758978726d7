"""Describe doubts about records and faults of rows, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics, ScoreMetrics
from kvbench.harness.report.eviction import eviction_flags
from kvbench.harness.report.pairing import past_training, question
from kvbench.harness.report.rows import Row

_CLIFF_NATS = math.log(2)  # twice the perplexity
_MIN_CLIFF_BLOCKS = 4
FLOOR = 0.5  # share of right answers below which dense says nothing about policies

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
    token = cliff(row, others)
    return [*dict.fromkeys(problems), *([f"cliff at token {token:,}"] if token is not None else [])]


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


def with_doubts(records: Sequence[Record]) -> list[Record]:
    """The records, with the doubts about their model, their questions and their eviction among their flags.

    Args:
        records: of any models. What one record says against its model counts against all of that model, and what dense can't
            answer against all records of these questions.
    """
    questions = [question(record) for record in records]
    dense = {key: r for key, r in zip(questions, records, strict=True) if r.cell.is_dense and r.status == "ok"}
    doubts: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        doubts.setdefault(_model(record), []).extend(_doubts(record))
    return [
        _flagged(record, [*dict.fromkeys(doubts[_model(record)]), *_about(record, dense.get(key))])
        for key, record in zip(questions, records, strict=True)
    ]


def _about(record: Record, dense: Record | None) -> Iterator[str]:
    """The doubts about a record alone. dense: of the same questions or text, if there is one."""
    if record.status != "ok":
        return
    if dense is not None:
        yield from _too_hard(dense)
    yield from eviction_flags(record, dense)


def _model(record: Record) -> tuple[str, ...]:
    """Return the identity of the record's weights and tokenizer: model id, revision and hash."""
    model = record.cell.model
    return model.id, str(model.revision), record.facts.weights_sha256


def _doubts(record: Record) -> Iterator[str]:
    if record.facts.tokenizer_differs is not None:
        yield record.facts.tokenizer_differs
    nats, guess = _dense_nats(record), record.facts.vocab_size
    if nats is not None and guess is not None and nats > math.log(guess):
        yield (
            "dense is worse than a uniform guess within the model's training length (perplexity "
            f"{math.exp(min(nats, 700)):,.0f}, vocabulary {guess:,}): are these its tokenizer, its weights and its kind of text?"
        )


def _too_hard(dense: Record) -> Iterator[str]:
    metrics = dense.measured(ScoreMetrics)
    share = None if metrics is None else metrics.accuracy
    if share is not None and share < FLOOR:
        yield f"dense can't: it answers {100 * share:.0f} % right, so answers to these questions say little about policies"


def _dense_nats(record: Record) -> float | None:
    """Mean NLL of dense over the positions that the model was trained at; None if it read none, or if this is not dense."""
    metrics, length = record.measured(NllMetrics), record.facts.training_length
    if metrics is None or not record.cell.is_dense:
        return None
    known = [bucket for bucket in metrics.buckets if length is None or bucket.to <= length]
    tokens = sum(bucket.tokens for bucket in known)
    return sum(bucket.nll * bucket.tokens for bucket in known) / tokens if tokens else None


def _flagged(record: Record, doubts: list[str]) -> Record:
    if not doubts or record.status != "ok":
        return record
    return replace(record, metrics=record.metrics.model_copy(update={"flags": [*record.metrics.flags, *doubts]}))
