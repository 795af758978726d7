"""Base class and figures of tasks with questions in a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO, Annotated, Any, Literal

from pydantic import Field

from kvbench.harness.core.files import json_lines
from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import answer_figures
from kvbench.harness.records.figure_rules import EXACT
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.records.run_facts import DataFacts
from kvbench.harness.records.types import Count, Duration
from kvbench.harness.report.markdown import percent, status
from kvbench.harness.report.shares import answers, count, streams_of, too_few
from kvbench.harness.tasks.task import Task

Context = Literal["gold", "model", "none"]


class QuizFacts(DataFacts):
    """Data of streams with questions."""

    streams: Annotated[Count | None, EXACT] = Field(None, description="number of independent streams")
    questions: Annotated[Count | None, EXACT] = Field(None, description="number of questions in all streams")
    line_tokens: Annotated[Duration | None, EXACT] = Field(None, description="mean tokens per line")
    prompt_tokens: Annotated[Duration | None, EXACT] = Field(
        None, description="mean tokens of the text before the first question, where that text is a prompt"
    )


class AnsweringTask(Task):
    """A task that asks questions during a stream. The trace has one line of JSON per answer."""

    metrics = AnswerMetrics
    data_facts = QuizFacts
    trace = ".answers.jsonl"

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute all figures from the trace. Each answer is compared with the right answer again."""
        options, answers = record.cell.task, json_lines(trace)
        needed = {"said", "gold"}
        return answer_figures(
            [a | ({"right": cls.is_right(options, a["said"], a["gold"])} if needed <= set(a) else {}) for a in answers]
        )

    @classmethod
    def is_right(cls, options: Any, completion: str, gold: str) -> bool:
        """Whether a completion is the right answer."""
        return completion == gold


def percent_or_status(*records: Record) -> str:
    """Return the percentage of right answers of all records with its interval; the status if a cell failed."""
    accuracy, failed = answers(records), [r for r in records if r.status != "ok"]
    return status((failed or records)[0]) if failed or accuracy is None else percent(accuracy.share, accuracy.ends, "")


def summed(records: Sequence[Record], by: Literal["in_cache", "kinds", "turns"]) -> dict[str, tuple[int, int]]:
    """Return (right answers, questions) of all records, by the part of a record's counts."""
    right, total = Counter[str](), Counter[str]()
    for metrics in (m for r in records if (m := r.measured(AnswerMetrics))):
        for part, counts in (getattr(metrics, by) or {}).items():
            right[part] += counts.right
            total[part] += counts.questions
    return {part: (right[part], questions) for part, questions in total.items()}


def about_intervals(records: Sequence[Record]) -> str:
    """Describe the intervals in a table, or the reason that the table has none."""
    streams = {count(of_questions) for r in records if (of_questions := streams_of(r)) is not None}
    if not streams:
        return "95 % Wilson intervals"
    few = min(streams)
    return "95 % intervals over streams" if few >= MIN_BLOCKS else f"no interval ({too_few(few)})"
