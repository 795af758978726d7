"""Flags on every record of a model that can't be the one that is meant, by its tokenizer or by what dense loses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics


def with_doubts(records: Sequence[Record]) -> list[Record]:
    """The records, with the doubts about their model among their flags.

    Args:
        records: of any models. What one record says against its model counts against all of that model.
    """
    doubts: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        doubts.setdefault(_model(record), []).extend(_doubts(record))
    return [_flagged(record, list(dict.fromkeys(doubts[_model(record)]))) for record in records]


def _model(record: Record) -> tuple[str, ...]:
    """What its weights and tokenizer came from."""
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


def _dense_nats(record: Record) -> float | None:
    """Mean NLL of dense over the positions that the model was trained at; None if it read none, or if this is not dense."""
    metrics, length = record.measured(NllMetrics), record.facts.training_length
    if metrics is None or record.cell.policy != "dense":
        return None
    known = [bucket for bucket in metrics.buckets if length is None or bucket.to <= length]
    tokens = sum(bucket.tokens for bucket in known)
    return sum(bucket.nll * bucket.tokens for bucket in known) / tokens if tokens else None


def _flagged(record: Record, doubts: list[str]) -> Record:
    if not doubts or record.status != "ok":
        return record
    return replace(record, metrics=record.metrics.model_copy(update={"flags": [*record.metrics.flags, *doubts]}))
