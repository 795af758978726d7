"""Options of the StreamEval task."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.tasks.common.answers import Context
from kvbench.harness.tasks.task import Options

_MAX_LINES = 10**6  # of all streams, generated in memory


class StreamEvalOptions(Options):
    """Options of the StreamEval task."""

    name: Literal["streameval"] = "streameval"
    lines: int = Field(1000, ge=1, description="record lines per stream")
    query_every: int = Field(10, ge=1, description="lines between questions")
    distance: int = Field(20, ge=1, description="a question is about the line this many lines back; 1 is the last line")
    streams: int = Field(1, ge=1, description="number of independent streams; each is read with a fresh cache")
    lowest: int = Field(1, ge=0, description="smallest register content")
    highest: int = Field(50000, ge=1, description="largest register content")
    context: Context = Field(
        "gold",
        description="what a question leaves in the stream: the right answer (gold), the model's (model), or nothing (none)",
    )
    data_seed: int = Field(0, ge=0, description="seed of the registers' contents")

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if self.distance > self.lines - self.lines % self.query_every:
            raise ValueError(
                f"distance {self.distance} is beyond the stream: its last question comes after line "
                f"{self.lines - self.lines % self.query_every}"
            )
        if self.streams * self.lines > _MAX_LINES:
            raise ValueError(f"{self.streams:,} streams of {self.lines:,} lines have more than {_MAX_LINES:,} lines together")
        if self.highest < self.lowest:
            raise ValueError(f"highest {self.highest} is below lowest {self.lowest}")
        return self
