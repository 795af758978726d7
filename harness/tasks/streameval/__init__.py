"""StreamEval: an endless record of numbered lines, and questions about the line `distance` lines back.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.3, Figures 8 and 9, Table 7. Lines follow LongEval (Li et al. 2023). The
authors released neither data nor code; what the paper leaves open is an option here (docs/tasks/streameval.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvbench.harness.data.registers import HEADER, answer, question, record_line, said
from kvbench.harness.records import Record
from kvbench.harness.records.metrics import AnswerMetrics
from kvbench.harness.report.chart import Chart
from kvbench.harness.tasks.common.answers import AnsweringTask
from kvbench.harness.tasks.streameval import page
from kvbench.harness.tasks.streameval.schema import StreamEvalOptions
from kvbench.harness.tasks.task import Job, MeasurementError, Options, Tokenizer

if TYPE_CHECKING:
    from kvbench.harness.data.questions import QuizData, Script


class StreamEval(AnsweringTask):
    """Accuracy of answers about an earlier line of an endless record."""

    options: ClassVar[type[Options]] = StreamEvalOptions
    axes: ClassVar[tuple[str, ...]] = ("distance",)
    named_by: ClassVar[tuple[str, ...]] = ("distance",)
    shown_options: ClassVar[tuple[str, ...] | None] = ("distance", "streams")

    @staticmethod
    def data(options: StreamEvalOptions, tokenizer: Tokenizer, directory: Path | None) -> QuizData:
        """Generated text, the same for every policy and machine."""
        from kvbench.harness.data.questions import quiz_data

        scripts = [script(options, stream) for stream in range(options.streams)]
        return quiz_data(scripts, f"generated, data seed {options.data_seed}", tokenizer())

    @staticmethod
    def total(options: StreamEvalOptions) -> int:
        """About 25 tokens per line."""
        return options.streams * options.lines * 25

    @classmethod
    def longest(cls, options: StreamEvalOptions) -> int:
        """One stream, because streams are read one after the other."""
        return cls.total(options) // options.streams

    @classmethod
    def windows(cls, options: StreamEvalOptions) -> float:
        """About ten tokens per answer."""
        return options.streams * 10 * options.lines / options.query_every

    @staticmethod
    def run(options: StreamEvalOptions, job: Job) -> AnswerMetrics:
        """Read the streams and answer their questions; the trace gets each answer."""
        from kvbench.harness.tasks.common.answering import answer_questions

        longest = max(int(q.line_tokens.max()) for q in job.data.quizzes)
        if job.config.capacity is not None and longest > job.config.capacity:
            raise MeasurementError(f"a record line takes {longest} tokens, but the cache holds {job.config.capacity}")
        return answer_questions(job, options.context, said)

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Accuracy by distance, and by whether the line was still in the cache."""
        return page.body(records)


def script(options: StreamEvalOptions, stream: int) -> Script:
    """The text of one stream. The lines depend only on the data seed and the stream's number."""
    from kvbench.harness.data.questions import Script

    draw = random.Random(f"{options.data_seed}/{stream}")
    text, contents = Script(HEADER), []
    for number in range(1, options.lines + 1):
        contents.append(draw.randint(options.lowest, options.highest))
        text.line(record_line(number, contents[-1]))
        target = number - options.distance
        if number % options.query_every == 0 and target >= 0:
            text.ask(question(1 + target), str(contents[target]), answer(contents[target]), target)
    return text
