"""Options of the StreamEval task."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.tasks.common.answers import Context
from kvbench.harness.tasks.task import Options

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
