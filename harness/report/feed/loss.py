"""What a policy loses to a reference, paired, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.harness.report.compare import MARGINS
from kvbench.harness.report.difference import Verdict, judge_interval
from kvbench.harness.report.feed.question import Question
from kvbench.harness.report.pairing import past_training
from kvbench.harness.report.rows import Row

CONTROL = "random"  # a policy that does no better gains nothing from choosing its tokens
_MAX_NATS = 700  # the exponential of more overflows


@dataclass(frozen=True)
class Loss:
    """A paired difference to a reference; above 0 is worse.

    Attributes:
        to: the reference.
        value: % of perplexity, or percentage points of right answers.
        low: lower end of the 95 % interval; None if the text is too short for one, or streams are too few.
        high: upper end.
        nats: (mean, low, high) in nats per token; None for answers.
        verdict: on the policy.
    """

    to: Row
    value: float
    low: float | None
    high: float | None
    nats: tuple[float, float | None, float | None] | None
    verdict: Verdict


def loss(question: Question, row: Row, base: Row | None) -> Loss | None:
    """What a row loses to another; None if the two can't be paired."""
    change = None if base is None or row is base else question.change(row, base)
    if base is None or change is None:
        return None
    of_text = question.measure == "perplexity"
    verdict = judge_interval(change.low, change.high, MARGINS["nll" if of_text else "accuracy"])
    ends = change.value, change.low, change.high
    value, low, high = (None if x is None else percent(x) if of_text else 100 * x for x in ends)
    assert value is not None
    return Loss(base, value, low, high, ends if of_text else None, verdict)


def percent(nats: float) -> float:
    """A difference in nats per token, as % of perplexity."""
    return 100 * math.expm1(min(nats, _MAX_NATS))


def reference(question: Question, capacity: int | None) -> Row | None:
    """What the caches of a capacity are compared with; None if there is nothing valid.

    It is the best recomputed window of that capacity, if every capacity has one. Otherwise it is the best of the largest
    capacity that has one, for all. Without any, it is dense, unless dense was read past the model's training length. Then it
    is the best random control of that capacity.
    """
    recomputed = [r for r in question.references if r is not question.dense and question.figure(r) is not None]
    sizes = {r.cell.capacity for r in recomputed}
    if recomputed and set(question.capacities) <= sizes:
        return _best(question, [r for r in recomputed if r.cell.capacity == capacity])
    if recomputed:
        largest = max(size or 0 for size in sizes)
        return _best(question, [r for r in recomputed if (r.cell.capacity or 0) == largest])
    if question.dense is not None and not _has_trend(question, question.dense):
        return question.dense
    controls = [r for r in question.at(capacity) if r.cell.policy == CONTROL and question.figure(r) is not None]
    return _best(question, controls) if controls else None


def _best(question: Question, rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda r: question.figure(r) or 0.0)


def _has_trend(question: Question, dense: Row) -> bool:
    if question.measure == "answers":
        return dense.answers is None
    return dense.perplexity is None or dense.nll is None or past_training(dense.perplexity)
