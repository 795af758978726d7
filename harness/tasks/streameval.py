"""StreamEval: an endless record of numbered lines, and questions about the line `distance` lines back.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.3, Figures 8 and 9, Table 7; the lines are in the manner of
LongEval (Li et al. 2023). Its authors released neither data nor code. What they leave open is an option here, and
docs/tasks/streameval.md says what we chose and why.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.data.questions import QuizData, Script, quiz_data
from kvbench.harness.data.registers import HEADER, answer, question, record_line, said
from kvbench.harness.tasks.answering import Context, answered
from kvbench.harness.tasks.task import Job, MeasurementError, Options, Task, Tokenizer

_MOST_LINES = 10**6  # of all streams: their text is made in memory


class StreamEvalOptions(Options):
    """Options of the StreamEval task."""

    name: Literal["streameval"] = "streameval"
    lines: int = Field(1000, ge=1, description="record lines of a stream")
    query_every: int = Field(10, ge=1, description="lines between questions")
    distance: int = Field(20, ge=1, description="a question is about the line so many lines back, 1 = the last")
    streams: int = Field(1, ge=1, description="independent streams, one after the other, each with a fresh cache")
    lowest: int = Field(1, ge=0, description="smallest content of a register")
    highest: int = Field(50000, ge=1, description="largest content of a register")
    context: Context = Field("gold", description="what stays of a question: with the right answer, the model's, or nothing")
    data_seed: int = Field(0, ge=0, description="of the registers' contents")

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.distance > self.lines - self.lines % self.query_every:
            raise ValueError(
                f"distance {self.distance} is beyond the stream: its last question comes after line "
                f"{self.lines - self.lines % self.query_every}"
            )
        if self.streams * self.lines > _MOST_LINES:
            raise ValueError(f"{self.streams:,} streams of {self.lines:,} lines are more than {_MOST_LINES:,} lines together")
        if self.highest < self.lowest:
            raise ValueError(f"highest {self.highest} is below lowest {self.lowest}")
        return self


class StreamEval(Task):
    """Accuracy of questions about a line some way back in an endless record."""

    options: ClassVar[type[Options]] = StreamEvalOptions
    trace: ClassVar[str] = ".answers.jsonl"

    @staticmethod
    def data(options: StreamEvalOptions, tokenizer: Tokenizer, directory: Path | None) -> QuizData:
        """Generated, the same for every policy and machine."""
        scripts = [script(options, stream) for stream in range(options.streams)]
        return quiz_data(scripts, f"generated, data seed {options.data_seed}", tokenizer())

    @staticmethod
    def total(options: StreamEvalOptions) -> int:
        """About 25 tokens a line."""
        return options.streams * options.lines * 25

    @classmethod
    def longest(cls, options: StreamEvalOptions) -> int:
        """One of the streams, which are read one after the other."""
        return cls.total(options) // options.streams

    @classmethod
    def windows(cls, options: StreamEvalOptions) -> float:
        """About ten tokens an answer."""
        return options.streams * 10 * options.lines / options.query_every

    @staticmethod
    def run(options: StreamEvalOptions, job: Job) -> dict[str, Any]:
        """Read, ask, compare; the trace gets every answer."""
        longest = max(int(q.line_tokens.max()) for q in job.data.quizzes)
        if job.config.capacity is not None and longest > job.config.capacity:
            raise MeasurementError(f"a record line takes {longest} tokens, and the cache holds {job.config.capacity}")
        return answered(job, options.context, said)


def script(options: StreamEvalOptions, stream: int) -> Script:
    """The text of one stream. Its contents depend on data seed and stream alone."""
    draw = random.Random(f"{options.data_seed}/{stream}")
    made, contents = Script(HEADER), []
    for number in range(1, options.lines + 1):
        contents.append(draw.randint(options.lowest, options.highest))
        made.line(record_line(number, contents[-1]))
        asked = number - options.distance  # index of the line asked for
        if number % options.query_every == 0 and asked >= 0:
            made.ask(question(1 + asked), str(contents[asked]), answer(contents[asked]), asked)
    return made
