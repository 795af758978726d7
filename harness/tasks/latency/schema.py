"""Options and figures of the latency task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.records.metrics import StepMetrics
from kvbench.harness.records.rules import EXACT, MACHINE, TIME, Checked, Unchecked
from kvbench.harness.records.types import Amount, Count, Duration, Number, Part, Positive
from kvbench.harness.tasks.task import MAX_TOKENS, Options

_LARGEST_CACHE = 2**28  # bytes of a processor's cache, from which weights and K/V may come faster than from memory
# Of the roofline's time: rates vary by some percent from one measurement to the next, and a cache is up to five times as fast as
# memory.
_LEAST_FROM_CACHE, _LEAST = 0.2, 0.8
_STEP_COUNT = Unchecked("depends on how many steps fit into a round")
_IF_BOUNDED = Checked(where="bounded")


class LatencyOptions(Options):
    """Options of the latency task."""

    name: Literal["latency"] = "latency"
    tokens: int = Field(4096, ge=2, le=MAX_TOKENS, description="length of the stream; the steady state is measured at its end")
    prompt: int = Field(256, ge=1, description="length of the prompt; the first token of its answer is timed")
    batch: int = Field(1, ge=1, description="number of streams side by side")
    steps: int = Field(16, ge=1, description="largest number of decode steps of a cell in one round")
    rounds: int = Field(8, ge=6, description="rounds in a sitting; each round times all cells, in random order")
    sittings: int = Field(3, ge=2, description="smallest number of sittings; each starts with fresh caches")
    most_sittings: int = Field(8, ge=2, description="largest number of sittings; a cell that has not settled by then is flagged")
    precision: float = Field(
        0.02, gt=0, lt=1, description="a cell is settled when the relative error of its median step is at most this"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.prompt > self.tokens:
            raise ValueError(f"prompt {self.prompt} is longer than the stream of {self.tokens} tokens")
        if self.sittings > self.most_sittings:
            raise ValueError(f"sittings {self.sittings} is more than most_sittings {self.most_sittings}")
        return self


class LatencyPoint(Part):
    """The time of a step at one point of the stream."""

    position: Annotated[Positive, EXACT] = Field(description="tokens read before")
    step_ms: Annotated[Duration, TIME] = Field(description="median of the rounds' medians")
    error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of step_ms")
    steps: Annotated[Count, _STEP_COUNT] = Field(0, description="number of timed steps")
    used_slots: Annotated[Amount, _IF_BOUNDED] = Field(description="slots that hold a token")
    attended_slots: Annotated[Amount, _IF_BOUNDED] = Field(description="slots that the step attended over")


class DeviceRates(Part):
    """Rates measured on the device, per second."""

    bandwidth: Annotated[Duration, MACHINE] = Field(description="bytes copied")
    multiply_rate: Annotated[Duration, MACHINE] = Field(description="operations of a matrix product")


class Roofline(Part):
    """The shortest time a step can take."""

    bytes: Annotated[Amount, _IF_BOUNDED] = Field(description="bytes that must move")
    operations: Annotated[Amount, _IF_BOUNDED] = Field(description="operations that must be done")
    ms: Annotated[Duration, MACHINE] = Field(description="milliseconds: the longer time of the two")


class LatencyMetrics(StepMetrics):
    """Figures of the latency task."""

    settled: Annotated[bool, TIME] = Field(False, description="whether the error is within the option `precision`")
    sittings: Annotated[Positive, TIME] = Field(description="number of sittings")
    percentiles_ms: Annotated[dict[str, Amount], TIME] = Field(description="percentiles of all steps")
    largest_ms: Annotated[Amount | None, TIME] = Field(None, description="longest step of a sitting, the median of the sittings")
    steps: Annotated[Count, _STEP_COUNT] = Field(0, description="number of steps timed at the end of the stream")
    spread_ms: Annotated[list[Amount], TIME] = Field(default_factory=list, description="smallest and largest median of a round")
    tokens_per_second: Annotated[Amount, TIME] = Field(description="tokens per second of all streams together")
    first_token_error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of first_token_ms")
    position: Annotated[Count, EXACT] = Field(0, description="tokens read before the last steps")
    curve: list[LatencyPoint] = Field(min_length=1, description="step times over the stream")
    bookkeeping_share: Annotated[Number, TIME] = Field(description="share of a step spent on statistics, scoring and eviction")
    roofline: Roofline | None = Field(None, description="the shortest time a step can take")
    over_roofline: Annotated[Amount, TIME] = Field(description="step_ms as a multiple of the roofline")
    device: DeviceRates = Field(description="rates measured on the device")

    def impossible(self) -> Iterator[str]:
        """Flags a step that is faster than its bytes and operations allow at the device's measured rates."""
        if self.roofline is None:
            return
        moved, done, rates = self.roofline.bytes, self.roofline.operations, self.device
        share = _LEAST_FROM_CACHE if moved <= _LARGEST_CACHE else _LEAST
        least = 1e3 * max(share * moved / rates.bandwidth, _LEAST * done / rates.multiply_rate)
        if self.step_ms < least:
            yield (
                f"step_ms is {self.step_ms:.3g}, but {moved:,.0f} bytes and {done:,.0f} operations take "
                f"{least:.3g} ms or more on this device"
            )
