"""ARC as one endless stream: all questions and answers one after the other, exact match at every answer.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.3, Table 5.
Differs: the paper does not say how a question is put; ours lists the choices by label and asks for the label.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvbench.harness.data import arc
from kvbench.harness.data.questions import QuizData, Script, quiz_data
from kvbench.harness.tasks.answering import Context, answered
from kvbench.harness.tasks.task import Job, Options, Task, Tokenizer


class ArcStreamOptions(Options):
    """Options of the ARC stream."""

    name: Literal["arc_stream"] = "arc_stream"
    subset: Literal["ARC-Easy", "ARC-Challenge"] = Field("ARC-Easy", description="which questions")
    split: Literal["train", "validation", "test"] = Field("test", description="of the data")
    questions: int | None = Field(None, ge=1, description="only the first so many")
    context: Context = Field("gold", description="what stays of a question: with the right answer, the model's, or nothing")
    one_at_a_time: bool | None = Field(None, description="every question with a fresh cache, the yardstick without a stream")


class ArcStream(Task):
    """Accuracy of multiple-choice questions that come as one endless stream."""

    options: ClassVar[type[Options]] = ArcStreamOptions
    trace: ClassVar[str] = ".answers.jsonl"

    @staticmethod
    def data(options: ArcStreamOptions, tokenizer: Tokenizer, directory: Path | None) -> QuizData:
        """The questions of the split, in their order."""
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
    def run(options: ArcStreamOptions, job: Job) -> dict[str, Any]:
        """Read, ask, compare; the trace gets every answer."""
        return answered(job, options.context, said)


def said(completion: str) -> str:
    """The label in a completion: its first word, without a full stop or brackets around it."""
    first = re.match(r"\s*\(?(\w+)", completion.split("\n", 1)[0])
    return first[1] if first else ""
