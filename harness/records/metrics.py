"""Kinds of figures: what pages, comparisons and the gate know by name. A task's own figures add to one of them. Imports no torch.

Every field says how the gate holds it (`records/rules.py`).
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbench.harness.records.rules import (
    ANSWERED,
    BYTES,
    BYTES_IF_BOUNDED,
    EXACT,
    MEAN_NATS,
    PART_NATS,
    RUN_NATS,
    SUM,
    TIME,
    Elsewhere,
    NotHeld,
    near,
)
from kvbench.harness.records.types import (
    Amount,
    Count,
    Document,
    Duration,
    Nats,
    Number,
    Outcomes,
    Part,
    Positive,
    Share,
    Whole,
)


class Metrics(Document):
    """Figures of any task."""

    kv_bytes: Annotated[Count | None, BYTES] = Field(None, description="bytes of K and V held")
    state_bytes: Annotated[Count | None, BYTES] = Field(None, description="bytes of the policy's statistics")
    flags: Annotated[list[str], Elsewhere("flags")] = Field(
        default_factory=list, description="what the task found wrong with its own figures"
    )


class Sums(Part):
    """NLL summed, and tokens counted, run by run."""

    nll_sum: Annotated[list[Nats], near(RUN_NATS, SUM)] = Field(description="nats, summed over the tokens of each run")
    tokens: Annotated[list[Count], EXACT] = Field(description="scored tokens of each run")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.nll_sum) != len(self.tokens) or not sum(self.tokens):
            raise ValueError("sums and tokens of one length, some token scored")
        return self


class Blocks(Sums):
    """Runs of `size` positions."""

    size: Annotated[Positive, EXACT] = Field(description="positions of a run")


class StrideBlocks(Blocks):
    """The same on the tokens that all cells scored, with the sums of each text."""

    texts: Sums = Field(description="sums of each text")


class Bucket(Part):
    """Mean NLL between two positions."""

    from_: Annotated[Count, EXACT] = Field(alias="from", description="first position")
    to: Annotated[Count, EXACT] = Field(description="first position after it")
    tokens: Annotated[Positive, EXACT] = Field(description="scored tokens")
    nll: Annotated[Nats, near(PART_NATS)] = Field(description="mean, nats")


class NllMetrics(Metrics):
    """Negative log-likelihood of a text, token by token: paired, ranked, and drawn over the stream."""

    tokens: Annotated[Positive, EXACT] = Field(description="scored tokens")
    nll: Annotated[Nats, near(MEAN_NATS)] = Field(description="mean, nats")
    perplexity: Annotated[Amount, near(relative=SUM)] = Field(description="exponential of nll")
    buckets: Annotated[list[Bucket], EXACT] = Field(
        default_factory=list, description="by position in the stream, each twice as long as all before it"
    )
    blocks: Blocks = Field(description="sums over short runs of positions: intervals and paired differences come from these")
    texts: Sums = Field(description="sums of each text")
    stream_tokens: Annotated[Positive | None, EXACT] = Field(None, description="tokens of text in each of several streams")
    on_stride: StrideBlocks | None = Field(None, description="the same on the tokens that every cell of the task scored")
    bytes: Annotated[Count | None, EXACT] = Field(None, description="UTF-8 bytes of the scored text")
    bits_per_byte: Annotated[Number | None, near(relative=SUM)] = Field(None, description="of the scored text")


class EvidenceCounts(Part):
    """Questions, and the right answers among them, by where their evidence was."""

    questions: Annotated[Positive, EXACT] = Field(description="asked")
    right: Annotated[Count, ANSWERED] = Field(description="answered rightly")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.right > self.questions:
            raise ValueError("no more right answers than questions")
        return self


class QuestionMetrics(Metrics):
    """Questions, and whether each was answered rightly, where that is how they are scored."""

    questions: Annotated[Positive, EXACT] = Field(description="asked")
    right: Annotated[Count | None, ANSWERED] = Field(None, description="answered rightly")
    accuracy: Annotated[Share | None, ANSWERED] = Field(None, description="share of right answers")
    outcomes: Annotated[Outcomes | None, ANSWERED] = Field(None, description="a digit a question, 1 for a right answer")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.right is not None and self.right > self.questions:
            raise ValueError("no more right answers than questions")
        if self.accuracy is not None and self.right is None:
            raise ValueError("accuracy without right")
        if self.outcomes is not None and len(self.outcomes) != self.questions:
            raise ValueError("outcomes: one a question")
        return self


class AnswerMetrics(QuestionMetrics):
    """Answers read off the stream, by how much of their evidence was in the cache."""

    right: Annotated[Count, ANSWERED] = Field(description="answered rightly")
    accuracy: Annotated[Share, ANSWERED] = Field(description="share of right answers")
    in_cache: Annotated[dict[str, EvidenceCounts], EXACT] = Field(description="by how much of the evidence was in the cache")
    reach: Annotated[Amount | None, near()] = Field(None, description="mean tokens back to the evidence")
    outcomes: Annotated[Outcomes, ANSWERED] = Field(description="a digit a question, 1 for a right answer")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes of K and V held")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics")


class ScoreMetrics(QuestionMetrics):
    """A score a question: right or wrong, a number, or a log-likelihood with its weight."""

    metric: Annotated[str, EXACT] = Field(min_length=1, max_length=500, description="what counts as the score")
    score: Annotated[Number, near(PART_NATS, SUM)] = Field(description="mean, weighted")
    stderr: Annotated[Amount | None, near(PART_NATS, SUM)] = Field(None, description="standard error of the score")
    scores: Annotated[list[Number] | None, near(RUN_NATS, SUM)] = Field(None, description="of every question, if not 0 or 1")
    weights: Annotated[list[Duration] | None, EXACT] = Field(None, description="of every question, if they differ")
    higher_is_better: Annotated[bool, EXACT] = Field(True, description="whether a larger score is the better one")

    @model_validator(mode="after")
    def _one_a_question(self) -> Self:
        if self.scores is not None and len(self.scores) != self.questions:
            raise ValueError("scores: one a question")
        if self.weights is not None and len(self.weights) != len(self.scores or []):
            raise ValueError("weights: one a score")
        return self


class StepMetrics(Metrics):
    """Time of a decode step: a ratio to a yardstick that was timed in turn with it."""

    step_ms: Annotated[Duration, Elsewhere("latency")] = Field(description="median of the rounds' medians")
    error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of step_ms")
    rounds_ms: Annotated[list[Duration], Elsewhere("latency")] = Field(min_length=1, description="median of each round")
    together: Annotated[str, NotHeld("a name that is new in every run")] = Field(
        description="the same in all records that were timed in turn"
    )
    calibration_ms: Annotated[list[Amount] | None, Elsewhere("latency")] = Field(
        None, description="the calibration step, in every round: what dense's step is held to"
    )
    first_token_ms: Annotated[Amount, Elsewhere("prompt")] = Field(description="from the prompt to its answer's first token")
    kv_bytes: Annotated[Count, BYTES_IF_BOUNDED] = Field(description="bytes of K and V held")
    state_bytes: Annotated[Count, BYTES_IF_BOUNDED] = Field(description="bytes of the policy's statistics")


class PeakMetrics(Metrics):
    """Memory taken, as it was found and not as it was reported."""

    peak_bytes: Annotated[Whole, Elsewhere("memory")] = Field(description="the most, over what there was with the model loaded")
    allocated_bytes: Annotated[Whole, Elsewhere("memory")] = Field(description="held at the end by the cache")
    growth_bytes: Annotated[Whole, Elsewhere("memory")] = Field(description="rise of the peak after the cache had filled")
    how: Annotated[str, NotHeld("what the system lets us read; peaks are compared where it is the same")] = Field(
        description="what was read to find the peak"
    )
