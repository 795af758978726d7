"""What tasks with questions on the way say of their records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvbench.harness.core.intervals import wilson
from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import of_answers
from kvbench.harness.records.facts import Data
from kvbench.harness.records.metrics import AnswerMetrics, Metrics, QuestionMetrics
from kvbench.harness.records.rules import EXACT
from kvbench.harness.records.types import Count, Duration
from kvbench.harness.report import compare
from kvbench.harness.report.difference import Difference, Traces
from kvbench.harness.report.markdown import status
from kvbench.harness.tasks.task import Task

Context = Literal["gold", "model", "none"]


class QuizFacts(Data):
    """Streams with questions in them."""

    streams: Annotated[Count | None, EXACT] = Field(None, description="independent streams")
    questions: Annotated[Count | None, EXACT] = Field(None, description="asked in all of them")
    line_tokens: Annotated[Duration | None, EXACT] = Field(None, description="mean tokens of a line")


class AnsweringTask(Task):
    """A task whose questions are answered on the way through a stream; the trace has a line of JSON for each."""

    metrics: ClassVar[type[Metrics]] = AnswerMetrics
    data_facts: ClassVar[type[Data]] = QuizFacts
    trace: ClassVar[str | None] = ".answers.jsonl"

    @classmethod
    def from_trace(cls, record: Record, trace: Path) -> Mapping[str, Any]:
        """All of them; whether an answer is right is looked at again, too."""
        lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        return of_answers([a | ({"right": a["said"] == a["gold"]} if {"said", "gold"} <= set(a) else {}) for a in lines])

    @classmethod
    def derived(cls, record: Record) -> Iterator[tuple[str, Any]]:
        """The share of right answers, and their number by the outcomes."""
        return of_outcomes(record)

    @classmethod
    def headline(cls, record: Record) -> str:
        """Right answers, and of how many."""
        metrics = record.measured(AnswerMetrics)
        return "" if metrics is None else f"accuracy {metrics.accuracy:.1%} of {metrics.questions}"

    @classmethod
    def differences(cls, a: Record, b: Record, traces: Traces) -> list[Difference]:
        """Of the share of right answers, question by question."""
        return compare.accuracy(a, b)


def of_outcomes(record: Record) -> Iterator[tuple[str, Any]]:
    """What follows from the outcomes of questions."""
    metrics = record.measured(QuestionMetrics)
    if metrics is not None and metrics.right is not None:
        yield "accuracy", metrics.right / metrics.questions
        yield "right", (metrics.outcomes or "").count("1")


def cell(record: Record | None) -> str:
    """Percent right with its interval; the status of a cell that failed."""
    if record is None:
        return ""
    metrics = record.measured(AnswerMetrics)
    return status(record) if metrics is None else percent(metrics.right, metrics.questions)


def percent(right: int, questions: int) -> str:
    """Percent right with its interval."""
    low, high = wilson(right, questions)
    return f"{100 * right / questions:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
