"""Options of the latency task, which its lanes read too."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.tasks.task import LONGEST, Options


class LatencyOptions(Options):
    """Options of the latency task."""

    name: Literal["latency"] = "latency"
    tokens: int = Field(4096, ge=2, le=LONGEST, description="length of the stream; its end is where the steady state is measured")
    prompt: int = Field(256, ge=1, description="tokens of the prompt whose answer's first token is waited for")
    batch: int = Field(1, ge=1, description="streams side by side")
    steps: int = Field(16, ge=1, description="decode steps of a cell in a row, at most, before it is the next cell's turn")
    rounds: int = Field(8, ge=6, description="turns of every cell in a sitting")
    sittings: int = Field(3, ge=2, description="times that all is begun anew with fresh caches, at least")
    most_sittings: int = Field(8, ge=2, description="sittings after which a cell that does not settle is recorded as unsettled")
    precision: float = Field(0.02, gt=0, lt=1, description="relative error of the median step at which a cell is settled")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.prompt > self.tokens:
            raise ValueError(f"prompt {self.prompt} is longer than the stream of {self.tokens} tokens")
        if self.sittings > self.most_sittings:
            raise ValueError(f"sittings {self.sittings} are more than most_sittings {self.most_sittings}")
        return self
