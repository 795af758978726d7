"""Options and figures of the memory task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbench.harness.records.metrics import PeakMetrics
from kvbench.harness.records.rules import BYTES, EXACT, TIME, NotHeld
from kvbench.harness.records.types import Amount, Count, Part, Positive, Whole
from kvbench.harness.tasks.task import LONGEST, Options


class MemoryOptions(Options):
    """Options of the memory task."""

    name: Literal["memory"] = "memory"
    tokens: int = Field(16384, ge=16, le=LONGEST, description="length of the stream")
    points: int = Field(16, ge=4, le=10_000, description="equal parts of the stream after each of which memory is read")
    batch: int = Field(1, ge=1, description="streams side by side")


class Point(Part):
    """Memory somewhere in the stream."""

    position: Annotated[Positive, EXACT] = Field(description="tokens read")
    peak_bytes: Annotated[Whole, NotHeld("on the way to the peak, which is held")] = Field(description="the most so far")
    token_ms: Annotated[Amount, TIME] = Field(description="of a token, in the part of the stream that ends here")


class MemoryMetrics(PeakMetrics):
    """Figures of the memory task."""

    expected_kv_bytes: Annotated[Count | None, BYTES] = Field(None, description="K and V by the shapes of the model's layers")
    weight_bytes: Annotated[Count, BYTES] = Field(description="of the model")
    curve: list[Point] = Field(min_length=1, description="over the stream")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes of K and V, as reported")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics, as reported")
