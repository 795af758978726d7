"""Right and wrong answers of two policies to the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report.pairing import task_version
from kvbench.harness.report.ranks import Pairs, sign_test
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import Ends, Stream, by_stream, count, difference_ends, streams_of


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


def answer_pairs(rows: Sequence[Row]) -> Pairs:
    """Difference in the share of wrong answers, with the p-value of a sign test over questions (McNemar's test), or over streams.

    Rows that share too few streams for an interval are no pair.
    """
    pairs = {}
    for j, b in enumerate(rows):
        for i, a in enumerate(rows[:j]):
            shared = shared_outcomes(a, b)
            if shared is not None and (shared.streams is None or count(shared.streams) >= MIN_BLOCKS):
                pairs[i, j] = shared.change, _p_value(shared)
    return pairs


def _p_value(shared: Shared) -> float:
    """Of the sign test; 1 if most streams say the opposite of the mean."""
    if shared.streams is None:
        return sign_test([int(y) - int(x) for x, y in zip(shared.a, shared.b, strict=True)])
    sums, _ = by_stream(shared.a, shared.b, shared.streams)
    majority = sum(x > 0 for x in sums) - sum(x < 0 for x in sums)
    return sign_test(sums) if majority * shared.change > 0 else 1.0
