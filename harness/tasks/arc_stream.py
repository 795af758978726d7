"""ARC as one endless stream: all questions and answers one after the other, exact match at every answer.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.3, Table 5.
Differs: the paper does not say how a question is put; ours lists the choices by label and asks for the label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.machines import row_label
from kvbench.harness.report.markdown import cache_bytes, count, table, task_line
from kvbench.harness.tasks.common.answers import AnsweringTask, Context, cell
from kvbench.harness.tasks.task import Job, Options, Tokenizer

if TYPE_CHECKING:
    from kvbench.harness.data.questions import QuizData


class ArcStreamOptions(Options):
    """Options of the ARC stream."""

    name: Literal["arc_stream"] = "arc_stream"
    subset: Literal["ARC-Easy", "ARC-Challenge"] = Field("ARC-Easy", description="which questions")
    split: Literal["train", "validation", "test"] = Field("test", description="of the data")
    questions: int | None = Field(None, ge=1, description="only the first so many")
    context: Context = Field("gold", description="what stays of a question: with the right answer, the model's, or nothing")
    one_at_a_time: bool | None = Field(None, description="every question with a fresh cache, the yardstick without a stream")


class ArcStream(AnsweringTask):
    """Accuracy of multiple-choice questions that come as one endless stream."""

    options: ClassVar[type[Options]] = ArcStreamOptions
    axes: ClassVar[tuple[str, ...]] = ("subset",)
    named_by: ClassVar[tuple[str, ...]] = ("subset",)
    shown_options: ClassVar[tuple[str, ...] | None] = ("split", "subset")

    @staticmethod
    def data(options: ArcStreamOptions, tokenizer: Tokenizer, directory: Path | None) -> QuizData:
        """The questions of the split, in their order."""
        from kvbench.harness.data import arc
        from kvbench.harness.data.questions import Script, quiz_data

        source, items = arc.items(options.subset, options.split, directory)
        items = items[: options.questions]
        scripts = [Script()]
        for item in items:
            if options.one_at_a_time and scripts[-1].questions:
                scripts.append(Script())
            choices = "".join(f"{label}. {choice}\n" for label, choice in zip(item.labels, item.choices, strict=True))
            scripts[-1].ask(f"Question: {item.question}\n{choices}Answer:", item.answer, f" {item.answer}\n\n")
        return quiz_data(scripts, source, tokenizer())

    @staticmethod
    def total(options: ArcStreamOptions) -> int:
        """About 60 tokens a question."""
        return 60 * (options.questions or 2376)

    @classmethod
    def longest(cls, options: ArcStreamOptions) -> int:
        """All questions, or one where each has a cache of its own."""
        return 60 if options.one_at_a_time else cls.total(options)

    @classmethod
    def windows(cls, options: ArcStreamOptions) -> float:
        """About four tokens an answer."""
        return 4 * (options.questions or 2376)

    @staticmethod
    def run(options: ArcStreamOptions, job: Job) -> AnswerMetrics:
        """Read, ask, compare; the trace gets every answer."""
        from kvbench.harness.tasks.common.answering import answered

        return answered(job, options.context, said)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Policies down, Easy and Challenge across, percent right with a 95 % Wilson interval."""
        subsets = sorted({_subset(r) for r in records}, reverse=True)
        rows: dict[tuple[str, str], dict[str, Record]] = {}
        for record in records:
            name = (row_label(record, records), count(record.cell.capacity))
            rows.setdefault(name, {})[_subset(record)] = record
        lines = []
        for name, row in rows.items():
            kv_bytes = next(iter(row.values())).metrics.kv_bytes
            lines.append([*name, *(cell(row.get(s)) for s in subsets), cache_bytes(kv_bytes)])
        head, about = ["policy", "capacity", *subsets, "K/V"], f"{task_line(records[0])}Percent right, 95 % Wilson intervals:\n"
        return [about, *table(head, lines, "lr" + "r" * len(subsets) + "r")]


def _subset(record: Record) -> str:
    return record.cell.task_options(ArcStreamOptions).subset


def said(completion: str) -> str:
    """The label in a completion: its first word, without a full stop or brackets around it."""
    first = re.match(r"\s*\(?(\w+)", completion.split("\n", 1)[0])
    return first[1] if first else ""
