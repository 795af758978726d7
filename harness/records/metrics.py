"""The figures of a record, task by task: what is always there, and what is of its type where it is there. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbench.harness.records.types import Amount, Count, Duration, Name, Nats, Number, Outcomes, Part, Positive, Share, Whole


class Sums(Part):
    """NLL summed, and tokens counted, run by run."""

    nll_sum: list[Nats]
    tokens: list[Count]

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.nll_sum) != len(self.tokens) or not sum(self.tokens):
            raise ValueError("sums and tokens of one length, some token scored")
        return self


class Blocks(Sums):
    """Runs of `size` positions."""

    size: Positive


class StrideBlocks(Blocks):
    """The same on the tokens that all cells scored, with the sums of each text."""

    texts: Sums


class Bucket(Part):
    """Mean NLL between two positions."""

    from_: Count = Field(alias="from")
    to: Count
    tokens: Positive
    nll: Nats


class FactCost(Part):
    """What the facts of prose cost, told so many words ago."""

    words_back: Annotated[list[Count], Field(min_length=2, max_length=2)] | None
    tellings: Positive
    nats: Nats
    drawn_nats: Annotated[float, Field(ge=0, le=700)]


class Held(Part):
    """Questions, and the right answers among them, by where their evidence was."""

    questions: Positive
    right: Count

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.right > self.questions:
            raise ValueError("no more right answers than questions")
        return self


class LatencyPoint(Part):
    """A step somewhere in the stream."""

    position: Positive
    step_ms: Duration
    error: Amount
    used_slots: Amount
    attended_slots: Amount


class MemoryPoint(Part):
    """Memory somewhere in the stream."""

    position: Positive
    peak_bytes: Whole
    token_ms: Amount


class DeviceRates(Part):
    """What the device was found to do, a second."""

    bandwidth: Duration
    multiply_rate: Duration


class Metrics(Part):
    """Figures of any task: what pages and comparisons look for by name, of its type where it is there."""

    nll: Nats = 0.0
    perplexity: Annotated[float, Field(ge=0)] = 0.0
    bits_per_byte: Number = 0.0
    bytes: Count = 0
    buckets: list[Bucket] = Field(default_factory=list)
    blocks: Blocks | None = None
    texts: Sums | None = None
    on_stride: StrideBlocks | None = None
    stream_tokens: Positive = 1
    facts: list[FactCost] = Field(default_factory=list)
    questions: Positive = 1
    right: Count = 0
    accuracy: Share = 0.0
    outcomes: Outcomes = ""
    in_cache: dict[str, Held] = Field(default_factory=dict)
    score: Number = 0.0
    stderr: Amount | None = None
    scores: list[Number] = Field(default_factory=list)
    weights: list[Duration] = Field(default_factory=list)
    higher_is_better: bool = True
    step_ms: Duration = 1.0
    rounds_ms: list[Duration] = Field(default_factory=list, min_length=1)
    together: str = ""
    kv_bytes: Count = 0
    state_bytes: Count = 0
    flags: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """Figures that are read together are there together, and fit."""
        given = self.model_fields_set
        for name in given & {"blocks", "texts", "on_stride"}:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is null")
        for name, others in _TOGETHER.items():
            if name in given and not others <= given:
                raise ValueError(f"{name} without {', '.join(sorted(others - given))}")
        if self.right > self.questions and "right" in given:
            raise ValueError("no more right answers than questions")
        for name in ("outcomes", "scores"):
            if name in given and "questions" in given and len(getattr(self, name)) != self.questions:
                raise ValueError(f"{name}: one a question")
        if "weights" in given and len(self.weights) != len(self.scores):
            raise ValueError("weights: one a score")
        return self


_TOGETHER = {
    "blocks": {"texts"}, "accuracy": {"right", "questions"}, "right": {"questions"}, "outcomes": {"questions"},
    "scores": {"score", "questions"}, "weights": {"scores"}, "rounds_ms": {"step_ms", "together"},
}  # fmt: skip


class PerplexityMetrics(Metrics):
    """Figures of `perplexity`."""

    tokens: Positive
    nll: Nats
    perplexity: Annotated[float, Field(ge=0)]
    bits_per_byte: Number
    blocks: Blocks
    texts: Sums
    kv_bytes: Count


class QuestionMetrics(Metrics):
    """Figures of `streameval` and `arc_stream`."""

    questions: Positive
    right: Count
    accuracy: Share
    outcomes: Outcomes
    in_cache: dict[str, Held]
    kv_bytes: Count
    state_bytes: Count


class LmEvalMetrics(Metrics):
    """Figures of `lm_eval`."""

    metric: Name
    questions: Positive
    score: Number
    requests: Count
    over_capacity: Count
    kv_bytes: Count
    state_bytes: Count


class LatencyMetrics(Metrics):
    """Figures of `latency`."""

    step_ms: Duration
    error: Amount
    sittings: Positive
    rounds_ms: Annotated[list[Duration], Field(min_length=1)]
    percentiles_ms: dict[str, Amount]
    tokens_per_second: Amount
    first_token_ms: Amount
    first_token_error: Amount
    curve: Annotated[list[LatencyPoint], Field(min_length=1)]
    bookkeeping_share: Number
    over_roofline: Amount
    device: DeviceRates
    together: str
    kv_bytes: Count
    state_bytes: Count


class MemoryMetrics(Metrics):
    """Figures of `memory`."""

    peak_bytes: Whole
    allocated_bytes: Whole
    growth_bytes: Whole
    weight_bytes: Count
    how: str
    curve: Annotated[list[MemoryPoint], Field(min_length=1)]
    kv_bytes: Count
    state_bytes: Count


BY_TASK: dict[str, type[Metrics]] = {
    "perplexity": PerplexityMetrics, "streameval": QuestionMetrics, "arc_stream": QuestionMetrics,
    "lm_eval": LmEvalMetrics, "latency": LatencyMetrics, "memory": MemoryMetrics,
}  # fmt: skip
