"""ARC as one endless stream of all questions and answers. Each answer must match exactly.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.3, Table 5.
Differs: the paper does not give its prompt. Ours lists the choices by label and asks for the label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from kvbench.harness.data import arc
from kvbench.harness.data.quiz import QuizData, Script, quiz_data
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import by_row, cache_bytes, policy_table, task_line
from kvbench.harness.report.rows import shown_kv_bytes
from kvbench.harness.tasks.common.answers import AnsweringTask, Context, about_intervals, percent_or_status
from kvbench.harness.tasks.task import Job, Options, Tokenizer, Workload


class ArcStreamOptions(Options):
    """Options of the ARC stream."""

    shown = ("split", "subset")
    axes = ("subset",)

    name: Literal["arc_stream"] = "arc_stream"
    subset: Literal["ARC-Easy", "ARC-Challenge"] = Field("ARC-Easy", description="set of questions")
    split: Literal["train", "validation", "test"] = Field("test", description="split of the data")
    questions: int | None = Field(None, ge=1, description="number of questions to ask, from the first; all if not given")
    context: Context = Field(
        "gold",
        description="answer that a question leaves in the stream: the right one (gold), the model's (model), or none (none)",
    )
    one_at_a_time: bool | None = Field(None, description="each question gets a fresh cache: the baseline without a stream")


class ArcStream(AnsweringTask):
    """Accuracy of multiple-choice questions that come as one endless stream."""

    options = ArcStreamOptions

    @staticmethod
    def data(options: ArcStreamOptions, tokenizer: Tokenizer, directory: Path | None) -> QuizData:
        """Return the questions of the split, in order."""
        source, items = arc.items(options.subset, options.split, directory)
        items = items[: options.questions]
        scripts = [Script()]
        for item in items:
            if options.one_at_a_time and scripts[-1].questions:
                scripts.append(Script())
            choices = "".join(f"{label}. {choice}\n" for label, choice in zip(item.labels, item.choices, strict=True))
            scripts[-1].ask(f"Question: {item.question}\n{choices}Answer:", item.answer, f" {item.answer}\n\n")
        return quiz_data(scripts, source, tokenizer())

    @classmethod
    def workload(cls, options: ArcStreamOptions) -> Workload:
        """Estimate 60 tokens per question and four per answer."""
        questions = options.questions or 2376
        streams = questions if options.one_at_a_time else 1
        return Workload(sequences=streams, length=60 * questions // streams, steps=4 * questions)

    @staticmethod
    def run(options: ArcStreamOptions, job: Job) -> AnswerMetrics:
        """Read the stream, answer its questions, and write each answer to the trace."""
        from kvbench.harness.tasks.common.answering import answer_questions

        return answer_questions(job, options.context, label_in)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return a row per policy and a column per subset: percent right with a 95 % interval."""
        subsets = sorted({_subset(r) for r in records}, reverse=True)
        rows = [
            (row[0], {_subset(r): percent_or_status(r) for r in row} | {"K/V": cache_bytes(shown_kv_bytes(row[0]))})
            for row in by_row(records)
        ]
        data = "".join(task_line(next(r for r in records if _subset(r) == subset)) for subset in subsets)
        about = f"{data}Percent right with {about_intervals(records)}:\n"
        return [about, *policy_table(rows, records, {head: head for head in (*subsets, "K/V")})]


def _subset(record: Record) -> str:
    return record.cell.task_options(ArcStreamOptions).subset


def label_in(completion: str) -> str:
    """Return the label in a completion: the first word of the first line, without punctuation."""
    word = re.match(r"\s*\(?(\w+)", completion.split("\n", 1)[0])
    return word[1] if word else ""
