"""Right and wrong answers of two policies to the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, clustered
from kvbench.harness.report.ranks import Comparison, compared, sign_test
from kvbench.harness.report.rows import Row
from kvbench.harness.report.shares import Ends, Stream, by_stream, count, difference_ends, paired_shares


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
    ours, theirs = a.answered, b.answered
    texts = {key: outcomes for key, (_, outcomes) in theirs.items()}
    if not ours or {key: len(outcomes) for key, (_, outcomes) in ours.items()} != {k: len(v) for k, v in texts.items()}:
        return None
    return Shared("".join(text for _, text in ours.values()), "".join(texts[key] for key in ours), a.answered_streams)


def answer_comparison(a: Row, b: Row) -> Comparison | None:
    """The share of right answers that b loses to a; None unless they answered the same questions.

    The p-value is that of a sign test over questions (McNemar's test), or over streams.
    """
    shared = shared_outcomes(b, a)
    if shared is None:
        return None
    if shared.streams is None:
        a_right, b_right = (int(outcomes, 2) for outcomes in (shared.a, shared.b))
        only = [(x & ~y).bit_count() for x, y in ((a_right, b_right), (b_right, a_right))]
        return Comparison(shared.change, sign_test(*only), partial(paired_shares, shared.a, shared.b))
    sums, asked = by_stream(shared.a, shared.b, shared.streams)
    if count(shared.streams) < MIN_BLOCKS:
        return Comparison(shared.change, None, lambda _: None)
    interval = clustered(np.array(sums), np.array(asked))
    more, fewer = sum(x > 0 for x in sums), sum(x < 0 for x in sums)
    agree = (more - fewer) * shared.change > 0  # not if most streams say the opposite of the mean
    return compared(interval, None if interval.p is None else sign_test(more, fewer) if agree else 1.0)
