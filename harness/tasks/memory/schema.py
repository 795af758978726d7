"""Options and figures of the memory task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbench.harness.records.metrics import PeakMetrics
from kvbench.harness.records.rules import BYTES, EXACT, TIME, Unchecked
from kvbench.harness.records.types import Amount, Count, Part, Positive, Whole
from kvbench.harness.tasks.task import MAX_TOKENS, Options


class MemoryOptions(Options):
    """Options of the memory task."""

    name: Literal["memory"] = "memory"
    tokens: int = Field(16384, ge=16, le=MAX_TOKENS, description="length of the stream")
    points: int = Field(16, ge=4, le=10_000, description="number of equal parts of the stream; memory is measured after each")
    batch: int = Field(1, ge=1, description="number of streams side by side")


class MemoryPoint(Part):
    """Memory at one point of the stream."""

    position: Annotated[Positive, EXACT] = Field(description="tokens read")
    peak_bytes: Annotated[Whole, Unchecked("the gate checks the final peak")] = Field(description="largest use so far")
    token_ms: Annotated[Amount, TIME] = Field(description="mean milliseconds per token in the part of the stream that ends here")


class MemoryMetrics(PeakMetrics):
    """Figures of the memory task."""

    expected_kv_bytes: Annotated[Count | None, BYTES] = Field(None, description="K and V by the shapes of the model's layers")
    weight_bytes: Annotated[Count, BYTES] = Field(description="bytes of the model's weights")
    curve: list[MemoryPoint] = Field(min_length=1, description="memory over the stream")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes of K and V, as reported")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics, as reported")
