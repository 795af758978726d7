"""Kinds of figures that pages, comparisons and the gate know. A task's metrics extend one of them. Imports no torch.

Every field says how the gate checks it (`records/figure_rules.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.records.figure_rules import (
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
    Unchecked,
    near,
)
from kvbench.harness.records.types import (
    Amount,
    Count,
    Document,
    Duration,
    FileName,
    Nats,
    Number,
    Outcomes,
    Part,
    Positive,
    Share,
    Whole,
)

if TYPE_CHECKING:
    from kvbench.harness.records.cell import CellSpec
    from kvbench.harness.records.run_facts import DataFacts

READ_AT_POINTS = "read at every point"  # memory was read at points, so the peak misses use in between, or of free memory


class Metrics(Document):
    """Figures of any task."""

    kv_bytes: Annotated[Count | None, BYTES] = Field(None, description="bytes allocated for K and V")
    kv_held_bytes: Annotated[Count | None, BYTES] = Field(
        None, description="bytes of K and V of the tokens held at the end; None in older records"
    )
    kv_read_bytes: Annotated[Count | None, BYTES] = Field(
        None, description="bytes of the cache that the last token reads, for a policy that selects; others read what they hold"
    )
    state_bytes: Annotated[Count | None, BYTES] = Field(None, description="bytes of the policy's statistics")
    tokens_read: Annotated[Positive | None, near()] = Field(
        None, description="tokens of the text that were read, where reading may stop before its end"
    )
    flags: Annotated[list[str], Elsewhere("flags")] = Field(
        default_factory=list, description="problems that the task found with its own figures"
    )

    def headline(self) -> str:
        """Return the main figure as a phrase; empty if the first plain number is the main figure."""
        return ""

    def check(self, options: Any) -> None:
        """Check the figures against the task's options.

        Raises:
            BadRecordError: the figures disagree with the options.
        """

    def derived(self, cell: CellSpec) -> Iterator[tuple[str, Any]]:
        """Yield (dotted name, value) of the figures that can be computed from other figures, for `bench records verify`."""
        return iter(())

    def impossible(self) -> Iterator[str]:
        """Yield a sentence for each figure that is better than physically possible, and so not what its name says."""
        return iter(())


class Sums(Part):
    """Sum of NLL and number of tokens of each run."""

    nll_sum: Annotated[list[Nats], near(RUN_NATS, SUM)] = Field(description="nats, summed over each run")
    tokens: Annotated[list[Count], EXACT] = Field(description="scored tokens of each run")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(self.nll_sum) != len(self.tokens) or not sum(self.tokens):
            raise ValueError("nll_sum and tokens must have the same length and at least one scored token")
        return self

    @cached_property
    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`nll_sum` and `tokens` as arrays, converted once because a record is paired with many records. [n] each."""
        arrays = np.array(self.nll_sum, np.float64), np.array(self.tokens, np.float64)
        for array in arrays:
            array.flags.writeable = False
        return arrays


class Blocks(Sums):
    """Sums over runs of `size` positions."""

    size: Annotated[Positive, EXACT] = Field(description="positions per run")


class StrideBlocks(Blocks):
    """Sums over the tokens that every cell scored, by run and by text."""

    texts: Sums = Field(description="sums of each text")


class Bucket(Part):
    """Mean NLL between two positions."""

    from_: Annotated[Count, EXACT] = Field(alias="from", description="first position")
    to: Annotated[Count, EXACT] = Field(description="first position after the bucket")
    tokens: Annotated[Positive, EXACT] = Field(description="scored tokens")
    nll: Annotated[Nats, near(PART_NATS)] = Field(description="mean NLL, nats per token")


class Look(Part):
    """The paired difference to the reference over the first `tokens` tokens."""

    tokens: Annotated[Positive, near()] = Field(description="tokens of the text read so far")
    mean: Annotated[Nats | None, near(PART_NATS)] = Field(description="NLL above the reference's; None if they can't be paired")
    low: Annotated[Nats | None, near(PART_NATS)] = Field(
        description="lower end of the interval of `mean`; None without an interval"
    )
    high: Annotated[Nats | None, near(PART_NATS)] = Field(description="upper end of the interval")


class Looks(Part):
    """Looks at the interval of a cell that is read until the interval is narrow enough."""

    reference: Annotated[FileName, Unchecked("its name has a key that changes with the code of the reference")] = Field(
        description="file of the reference's record, beside this one"
    )
    planned: Annotated[Positive, EXACT] = Field(description="looks at most; every interval is corrected for their number")
    taken: Annotated[list[Look], near()] = Field(min_length=1, description="looks that were taken")
    reason: Annotated[Literal["interval reached", "limit reached"], near()] = Field(description="reason that reading stopped")


class NllMetrics(Metrics):
    """Negative log-likelihood of a text. Pages rank it, compare it token by token, and draw it over the stream."""

    tokens: Annotated[Positive, EXACT] = Field(description="scored tokens")
    nll: Annotated[Nats, near(MEAN_NATS)] = Field(description="mean NLL, nats per token")
    perplexity: Annotated[Amount, near(relative=SUM)] = Field(description="exponential of nll")
    buckets: Annotated[list[Bucket], EXACT] = Field(
        default_factory=list,
        description="mean NLL by position in the stream; each bucket ends at twice the position of the one before",
    )
    blocks: Blocks = Field(description="sums over short runs of positions, for intervals and paired differences")
    texts: Sums = Field(description="sums of each text")
    stream_tokens: Annotated[Positive | None, EXACT] = Field(None, description="tokens of text per stream, if there are several")
    on_stride: StrideBlocks | None = Field(None, description="sums over the tokens that every cell of the task scored")
    bytes: Annotated[Count | None, EXACT] = Field(None, description="UTF-8 bytes of the scored text")
    bits_per_byte: Annotated[Number | None, near(relative=SUM)] = Field(None, description="bits per byte of the scored text")
    looks: Looks | None = Field(None, description="looks at the interval to the reference, until it was narrow enough")

    def derived(self, cell: CellSpec) -> Iterator[tuple[str, Any]]:
        """Yield perplexity, and bits per byte unless the record lacks the number of bytes."""
        yield "perplexity", perplexity(self.nll)
        if self.bytes is not None:
            yield "bits_per_byte", self.nll * self.tokens / math.log(2) / max(1, self.bytes)

    @cached_property
    def all_tokens(self) -> StrideBlocks:
        """Sums over all scored tokens, by run and by text."""
        blocks = self.blocks
        return StrideBlocks.model_construct(nll_sum=blocks.nll_sum, tokens=blocks.tokens, size=blocks.size, texts=self.texts)

    @property
    def planned_looks(self) -> int:
        """Number of lengths of the text at which reading might have stopped, the text's end included."""
        return 1 if self.looks is None else self.looks.planned


class AnswerCounts(Part):
    """Counts of questions and right answers of one sort, such as questions whose whole evidence was in the cache."""

    questions: Annotated[Positive, EXACT] = Field(description="number of questions")
    right: Annotated[Count, ANSWERED] = Field(description="right answers")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.right > self.questions:
            raise ValueError("more right answers than questions")
        return self


class QuestionMetrics(Metrics):
    """Number of questions and, if each answer is right or wrong, of right answers."""

    questions: Annotated[Positive, EXACT] = Field(description="number of questions")
    right: Annotated[Count | None, ANSWERED] = Field(None, description="right answers")
    accuracy: Annotated[Share | None, ANSWERED] = Field(None, description="share of right answers")
    outcomes: Annotated[Outcomes | None, ANSWERED] = Field(None, description="one digit per question, 1 for a right answer")

    @property
    def evicted_questions(self) -> int:
        """Number of questions whose answers may follow an eviction."""
        return self.questions

    def question_streams(self, options: Any, data: DataFacts) -> int | None:
        """Return the number of streams that share the questions evenly, in order; None if every question has its own cache."""
        return None

    def derived(self, cell: CellSpec) -> Iterator[tuple[str, Any]]:
        """Yield the share and the number of right answers, computed from the outcomes."""
        if self.right is not None:
            yield "accuracy", self.right / self.questions
            yield "right", (self.outcomes or "").count("1")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.right is not None and self.right > self.questions:
            raise ValueError("more right answers than questions")
        if self.accuracy is not None and self.right is None:
            raise ValueError("accuracy is given, but not right")
        if self.outcomes is not None and len(self.outcomes) != self.questions:
            raise ValueError("outcomes must have one digit per question")
        return self


class AnswerMetrics(QuestionMetrics):
    """Counts of right answers during a stream, by the share of the evidence that was in the cache."""

    right: Annotated[Count, ANSWERED] = Field(description="right answers")
    accuracy: Annotated[Share, ANSWERED] = Field(description="share of right answers")
    in_cache: Annotated[dict[str, AnswerCounts], EXACT] = Field(description="counts by how much of the evidence was in the cache")
    kinds: Annotated[dict[str, AnswerCounts] | None, EXACT] = Field(
        None, description="counts by kind, where questions are of several kinds"
    )
    turns: Annotated[dict[str, AnswerCounts] | None, EXACT] = Field(
        None, description="counts by the number of the turn, where questions come in turns"
    )
    stale: Annotated[Count | None, ANSWERED] = Field(
        None, description="answers that are a value before it was corrected, where questions are about corrected values"
    )
    reach: Annotated[Amount | None, near()] = Field(None, description="mean distance to the evidence, in tokens")
    outcomes: Annotated[Outcomes, ANSWERED] = Field(description="one digit per question, 1 for a right answer")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes allocated for K and V")
    state_bytes: Annotated[Count, BYTES] = Field(description="bytes of the policy's statistics")

    def headline(self) -> str:
        """Return the accuracy and the number of questions."""
        return f"accuracy {self.accuracy:.1%} of {self.questions}"

    def question_streams(self, options: Any, data: DataFacts) -> int | None:
        """Return the number of streams that were read; 1 for older records, which lack the number."""
        streams: int = getattr(data, "streams", None) or 1
        return None if streams == self.questions > 1 else streams


class ScoreMetrics(QuestionMetrics):
    """Metrics with one score per question: right or wrong, a number, or a log-likelihood with a weight."""

    metric: Annotated[str, EXACT] = Field(min_length=1, max_length=500, description="name of the metric that is the score")
    score: Annotated[Number, near(PART_NATS, SUM)] = Field(description="weighted mean")
    stderr: Annotated[Amount | None, near(PART_NATS, SUM)] = Field(None, description="standard error of the score")
    scores: Annotated[list[Number] | None, near(RUN_NATS, SUM)] = Field(
        None, description="score of each question, unless all are 0 or 1"
    )
    weights: Annotated[list[Duration] | None, EXACT] = Field(None, description="weight of each question, if weights differ")
    higher_is_better: Annotated[bool, EXACT] = Field(True, description="whether a larger score is better")

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if self.scores is not None and len(self.scores) != self.questions:
            raise ValueError("scores must have one entry per question")
        if self.weights is not None and len(self.weights) != len(self.scores or []):
            raise ValueError("weights must have one entry per score")
        return self


class SampleMetrics(Metrics):
    """Means over the predictions in samples of one text, all of one length."""

    samples: Annotated[Positive, EXACT] = Field(description="pieces of text")
    tokens: Annotated[Positive, EXACT] = Field(description="predictions compared, in all samples")


class StepMetrics(Metrics):
    """Time of a decode step, compared as a ratio to a reference that was timed in the same rounds."""

    step_ms: Annotated[Duration, Elsewhere("latency")] = Field(
        description="median of the rounds' medians: time per output token after the first (TPOT)"
    )
    error: Annotated[Amount, TIME] = Field(description="half the relative 95 % interval of step_ms")
    rounds_ms: Annotated[list[Duration], Elsewhere("latency")] = Field(min_length=1, description="median of each round")
    together: Annotated[str, Unchecked("an identifier that is new in every run")] = Field(
        description="identifies the records that were timed in the same rounds"
    )
    forward_ms: Annotated[list[Duration] | None, Elsewhere("latency")] = Field(
        None, description="milliseconds of the model's own forward pass over a token in each round; the reference for dense"
    )
    calibration_ms: Annotated[list[Amount] | None, Unchecked("forward_ms took its place")] = Field(
        None, description="milliseconds of the calibration step in each round, in older records"
    )
    first_token_ms: Annotated[Amount, Elsewhere("prompt")] = Field(
        description="milliseconds from the prompt to the answer's first token (TTFT), eviction included"
    )
    tokens_per_second: Annotated[Amount | None, TIME] = Field(None, description="tokens per second of all streams together")
    kv_bytes: Annotated[Count, BYTES_IF_BOUNDED] = Field(description="bytes of K and V held")
    state_bytes: Annotated[Count, BYTES_IF_BOUNDED] = Field(description="bytes of the policy's statistics")


class PeakMetrics(Metrics):
    """Measured memory use, independent of the bytes that the cache reports."""

    peak_bytes: Annotated[Whole, Elsewhere("memory")] = Field(description="largest use, above that with the model loaded")
    allocated_bytes: Annotated[Whole, Elsewhere("memory")] = Field(description="held by the cache at the end")
    growth_bytes: Annotated[Whole, Elsewhere("memory")] = Field(description="rise of the peak after the cache was full")
    how: Annotated[str, Unchecked("depends on the system; peaks are compared only if it is equal")] = Field(
        description="method of measuring the peak"
    )

    def impossible(self) -> Iterator[str]:
        """Yield a sentence if the peak is below the bytes held at the end. Peaks read at points are not checked."""
        held = self.kv_held_bytes
        if held is not None and self.peak_bytes < held and not self.how.endswith(READ_AT_POINTS):
            yield f"peak_bytes is {self.peak_bytes:,}, but {held:,} bytes of K and V were held at the end"
