"""Right and wrong answers of two policies to the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report.pairing import task_version
from kvbench.harness.report.ranks import Comparison, compared, sign_test
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import Ends, Stream, by_stream, difference, difference_ends, paired_shares, streams_of


@dataclass(frozen=True)
class Shared:
    """Outcomes of two rows for the same questions: one digit per question, 1 for a right answer.

    Attributes:
        a: of one row.
        b: of the other.
        streams: of each question; None if every question has a cache of its own.
    """

    a: str
    b: str
    streams: Sequence[Stream] | None

    @property
    def change(self) -> float:
        """Share of right answers of `b` minus that of `a`."""
        return (self.b.count("1") - self.a.count("1")) / len(self.a)

    @property
    def ends(self) -> Ends | None:
        """The 95 % interval of the change; None if there are too few streams for one."""
        return difference_ends(self.a, self.b, self.streams)


def shared_outcomes(a: Row, b: Row) -> Shared | None:
    """Outcomes of both rows in the same order; None unless they answered the same questions."""
    ours, theirs = _answered(a), _answered(b)
    texts = {key: outcomes for key, (_, outcomes) in theirs.items()}
    if not ours or {key: len(outcomes) for key, (_, outcomes) in ours.items()} != {k: len(v) for k, v in texts.items()}:
        return None
    return Shared("".join(text for _, text in ours.values()), "".join(texts[key] for key in ours), _streams(ours))


def _answered(row: Row) -> dict[str, tuple[Record, str]]:
    """Records and their outcomes, by task and text."""
    return {
        repr([r.cell.options, r.data.ids_sha256, *task_version(r)]): (r, metrics.outcomes)
        for r in row.records
        if (metrics := r.measured(QuestionMetrics)) and metrics.outcomes
    }


def _streams(answered: dict[str, tuple[Record, str]]) -> list[Stream] | None:
    """The stream of each question, in order; a question with a cache of its own is one, too. None if all are."""
    streams = {key: streams_of(record) for key, (record, _) in answered.items()}
    if not any(streams.values()):
        return None
    alone = {key: [(key, i) for i in range(len(outcomes))] for key, (_, outcomes) in answered.items()}
    return [stream for key in answered for stream in streams[key] or alone[key]]


def answer_comparison(a: Row, b: Row) -> Comparison | None:
    """The share of right answers that b loses to a; None unless they answered the same questions.

    The p-value is that of a sign test over questions (McNemar's test), or over streams.
    """
    shared = shared_outcomes(b, a)
    if shared is None:
        return None
    if shared.streams is None:
        p = sign_test([int(y) - int(x) for x, y in zip(shared.a, shared.b, strict=True)])
        return Comparison(shared.change, p, partial(paired_shares, shared.a, shared.b))
    interval = difference(shared.a, shared.b, shared.streams)
    if interval is None:
        return Comparison(shared.change, None, lambda _: None)
    return compared(interval, None if interval.p is None else _p_value(shared, shared.streams))


def _p_value(shared: Shared, streams: Sequence[Stream]) -> float:
    """Of the sign test over streams; 1 if most streams say the opposite of the mean."""
    sums, _ = by_stream(shared.a, shared.b, streams)
    majority = sum(x > 0 for x in sums) - sum(x < 0 for x in sums)
    return sign_test(sums) if majority * shared.change > 0 else 1.0
