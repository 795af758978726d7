"""Shares of right answers and their differences, with intervals over independent units. Imports no torch.

Questions that each have their own cache are independent. Questions of one stream depend on the same evictions, so streams are the
units there. Fewer than `MIN_BLOCKS` streams have no interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, Ends, clustered_share, wilson
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics

Stream = tuple[str, int]  # task, number of the stream


@dataclass(frozen=True)
class Answers:
    """Numbers of right answers and of questions, in total and by stream.

    streams: (right answers, questions) of each stream; empty if every question has its own cache.
    """

    right: int
    questions: int
    streams: Sequence[tuple[int, int]] = ()

    @property
    def share(self) -> float:
        """Share of right answers."""
        return self.right / self.questions

    @property
    def ends(self) -> Ends | None:
        """Ends of the 95 % interval of the share; None if there are too few streams for an interval."""
        if not self.streams:
            return wilson(self.right, self.questions)
        if len(self.streams) < MIN_BLOCKS:
            return None
        right, counts = (np.array(x, np.float64) for x in zip(*self.streams, strict=True))
        return clustered_share(right, counts)


def streams_of(record: Record) -> list[Stream] | None:
    """Return the stream of each question; None if every question has its own cache."""
    metrics = record.measured(QuestionMetrics)
    streams = None if metrics is None else metrics.question_streams(record.cell.task, record.data)
    if metrics is None or streams is None:
        return None
    return [(record.cell.task.name, i * streams // metrics.questions) for i in range(metrics.questions)]


def is_answered(record: Record) -> bool:
    """Return whether a record has a number of right answers."""
    metrics = record.measured(QuestionMetrics)
    return metrics is not None and metrics.right is not None


def answers(records: Sequence[Record]) -> Answers | None:
    """Return the right answers of all records in total; None if no record has answers.

    Streams of one task and number are merged. If there are streams, each independent question counts as a stream.
    """
    answered = [(r, m) for r in filter(is_answered, records) if (m := r.measured(QuestionMetrics))]
    if not answered:
        return None
    right, questions = sum(m.right or 0 for _, m in answered), sum(m.questions for _, m in answered)
    streams: dict[Stream, Counter[str]] = {}
    for record, metrics in answered:
        digits = metrics.outcomes or "1" * (metrics.right or 0) + "0" * (metrics.questions - (metrics.right or 0))
        for stream, digit in zip(streams_of(record) or (), digits, strict=False):
            streams.setdefault(stream, Counter())[digit] += 1
    of_streams = [(digits["1"], digits.total()) for digits in streams.values()]
    alone = questions - sum(size for _, size in of_streams)
    if len(of_streams) >= MIN_BLOCKS:
        right_alone = right - sum(hits for hits, _ in of_streams)
        of_streams += [(1, 1)] * right_alone + [(0, 1)] * (alone - right_alone)
    return Answers(right, questions, of_streams)


def count(streams: Sequence[Stream]) -> int:
    """Return the number of streams with several questions; if there are none, the number of all streams."""
    sizes = Counter(streams).values()
    return sum(size > 1 for size in sizes) or len(sizes)


def too_few(streams: int) -> str:
    """Return the reason that there is no interval."""
    return f"too few streams for an interval: {streams} of {MIN_BLOCKS}"


def paired_shares(a: str, b: str, comparisons: int = 1) -> Ends:
    """Return the 95 % interval of the difference of two shares of right answers to the same independent questions.

    Args:
        a: outcomes of the subtrahend, one "0" or "1" per question; "1" is right.
        b: outcomes of the minuend.
        comparisons: number of intervals that all hold at once.

    Source: Newcombe 1998, Statistics in Medicine 17, 2635-2650, method 10: Wilson intervals combined with their correlation.
    """
    n, of_a, of_b = len(a), int(a, 2), int(b, 2)
    both, only_a, only_b = (bits.bit_count() for bits in (of_a & of_b, of_a & ~of_b, of_b & ~of_a))
    none = n - both - only_a - only_b
    x, y = (both + only_a) / n, (both + only_b) / n
    (low_a, high_a), (low_b, high_b) = wilson(both + only_a, n, comparisons), wilson(both + only_b, n, comparisons)
    scale = math.sqrt((both + only_a) * (only_b + none) * (both + only_b) * (only_a + none))
    covariance = both * none - only_a * only_b
    phi = (max(covariance - n / 2, 0) if covariance > 0 else covariance) / scale if scale else 0.0

    def width(down: float, up: float) -> float:
        return math.sqrt(max(down * down - 2 * phi * down * up + up * up, 0.0))

    return y - x - width(y - low_b, high_a - x), y - x + width(high_b - y, x - low_a)


def shares(a: tuple[int, int], b: tuple[int, int]) -> Ends:
    """Return the 95 % interval of b's share minus a's, for independent shares given as (right, questions).

    Source: Newcombe 1998, Statistics in Medicine 17, method 10.
    """
    x, y = a[0] / a[1], b[0] / b[1]
    (low_a, high_a), (low_b, high_b) = wilson(*a), wilson(*b)
    return y - x - math.hypot(y - low_b, high_a - x), y - x + math.hypot(high_b - y, x - low_a)
