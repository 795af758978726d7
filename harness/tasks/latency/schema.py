"""Options and figures of the latency task."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.records.metrics import StepMetrics
from kvbench.harness.records.rules import EXACT, MACHINE, TIME, Checked, Unchecked
from kvbench.harness.records.types import Amount, Count, Duration, Number, Part, Positive
from kvbench.harness.tasks.task import MAX_TOKENS, Options

_AS_MANY = Unchecked("as many as the time of a turn allowed")
_IF_BOUNDED = Checked(where="bounded")


class LatencyOptions(Options):
    """Options of the latency task."""

    name: Literal["latency"] = "latency"
    tokens: int = Field(4096, ge=2, le=MAX_TOKENS, description="length of the stream; its end is where the steady state is measured")
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


class Point(Part):
    """A step somewhere in the stream."""

    position: Annotated[Positive, EXACT] = Field(description="tokens read before it")
    step_ms: Annotated[Duration, TIME] = Field(description="median of the rounds' medians")
    error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of step_ms")
    steps: Annotated[Count, _AS_MANY] = Field(0, description="timed")
    used_slots: Annotated[Amount, _IF_BOUNDED] = Field(description="that hold a token")
    attended_slots: Annotated[Amount, _IF_BOUNDED] = Field(description="that the step attended over")


class DeviceRates(Part):
    """What the device was found to do, a second."""

    bandwidth: Annotated[Duration, MACHINE] = Field(description="bytes copied")
    multiply_rate: Annotated[Duration, MACHINE] = Field(description="operations of a product of matrices")


class Roofline(Part):
    """The shortest time that a step can take."""

    bytes: Annotated[Amount, _IF_BOUNDED] = Field(description="that must move")
    operations: Annotated[Amount, _IF_BOUNDED] = Field(description="that must be done")
    ms: Annotated[Duration, MACHINE] = Field(description="the longer of the two")


class LatencyMetrics(StepMetrics):
    """Figures of the latency task."""

    settled: Annotated[bool, TIME] = Field(False, description="whether the error is as small as was asked for")
    sittings: Annotated[Positive, TIME] = Field(description="times that all was begun anew")
    percentiles_ms: Annotated[dict[str, Amount], TIME] = Field(description="of all steps")
    steps: Annotated[Count, _AS_MANY] = Field(0, description="timed at the end of the stream")
    spread_ms: Annotated[list[Amount], TIME] = Field(default_factory=list, description="smallest and largest median of a round")
    tokens_per_second: Annotated[Amount, TIME] = Field(description="of all streams together")
    first_token_error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of first_token_ms")
    position: Annotated[Count, EXACT] = Field(0, description="tokens read before the last steps")
    curve: list[Point] = Field(min_length=1, description="over the stream")
    bookkeeping_share: Annotated[Number, TIME] = Field(description="of a step: statistics, scoring and evicting")
    roofline: Roofline | None = Field(None, description="the shortest time that a step can take")
    over_roofline: Annotated[Amount, TIME] = Field(description="step_ms as a multiple of it")
    device: DeviceRates = Field(description="what the device was found to do")
