"""Right and wrong answers of two policies to the same questions."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.harness.records.metrics import QuestionMetrics
from kvbench.harness.report.ranks import Pairs, sign_test
from kvbench.harness.report.rows import Row


def outcomes(row: Row) -> dict[str, str]:
    """Outcomes by task and text: one digit per question, 1 for a right answer."""
    return {
        repr([r.cell.options, r.data.ids_sha256]): metrics.outcomes
        for r in row.records
        if (metrics := r.measured(QuestionMetrics)) and metrics.outcomes
    }


def shared_outcomes(a: Row, b: Row) -> tuple[str, str] | None:
    """Outcomes of both rows in the same order; None unless they answered the same questions."""
    ours, theirs = outcomes(a), outcomes(b)
    if not ours or {k: len(v) for k, v in ours.items()} != {k: len(v) for k, v in theirs.items()}:
        return None
    return "".join(ours.values()), "".join(theirs[key] for key in ours)


def answer_pairs(rows: Sequence[Row]) -> Pairs:
    """Difference in the share of wrong answers, with the p-value of a sign test over questions (McNemar's test)."""
    pairs = {}
    for j, b in enumerate(rows):
        for i, a in enumerate(rows[:j]):
            shared = shared_outcomes(a, b)
            if shared is not None:
                wrong = [int(y) - int(x) for x, y in zip(*shared, strict=True)]
                pairs[i, j] = sum(wrong) / len(wrong), sign_test(wrong)
    return pairs
