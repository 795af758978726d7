"""Options and figures of the perplexity task, and the rule that stops reading.

With `until`, the difference to a reference is computed at doubling lengths of the text. The interval of each look is corrected
for the number of planned looks (`core/intervals.py`). The interval at which reading stops therefore has the coverage of an
interval of a text of fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbench.harness.core.intervals import MIN_BLOCK_TOKENS, MIN_BLOCKS, look_lengths
from kvbench.harness.data.texts import GENERATED, Source
from kvbench.harness.records.aggregates import nll_figures
from kvbench.harness.records.figure_rules import BYTES, EXACT, RUN_NATS, SUM, near
from kvbench.harness.records.metrics import Look, Looks, NllMetrics
from kvbench.harness.records.types import Count, Nats, Number, Part, Positive
from kvbench.harness.report.markdown import digits
from kvbench.harness.report.pairing import mean_difference
from kvbench.harness.tasks.task import MAX_TOKENS, Options

_MAX_GENERATED_TOKENS = 2**24  # generated text is held in memory


class Until(BaseModel):
    """Rule that stops reading when an interval is narrow enough."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    interval: float = Field(
        gt=0, description="half the width of the 95 % interval of the difference to the reference, nats per token"
    )
    reference: Literal["dense", "recompute_window"] = Field(
        "recompute_window", description="policy to compare with, at the same capacity; it reads to the end"
    )


class PerplexityOptions(Options):
    """Options of the perplexity task."""

    not_recorded = frozenset({"side_by_side"})
    shown = ("data", "split", "tokens", "book", "streams", "prompt")

    name: Literal["perplexity"] = "perplexity"
    data: Source = Field(
        "pg19", description="books (pg19), Wikipedia articles (wikitext), generated prose, or the words of Bigram-Backcopy"
    )
    split: Literal["train", "validation", "test"] = Field("test", description="split of the data")
    tokens: int = Field(65536, ge=2, le=MAX_TOKENS, description="length of the stream in tokens, without the prefix")
    book: int | None = Field(None, ge=1, description="read only the book with this Project Gutenberg number, up to `tokens`")
    data_seed: int | None = Field(None, ge=0, description="seed of generated text; 0 if not given")
    newlines: int | None = Field(
        None, ge=1, description="number of newline tokens that open the stream in place of the tokenizer's BOS"
    )
    streams: int | None = Field(
        None, ge=1, description="cut the text into this many streams of equal length, each read after the prefix"
    )
    side_by_side: int | None = Field(None, ge=1, description="number of streams read at once; all if not given")
    prompt: int | None = Field(
        None, ge=1, description="first tokens of each stream that are its prompt: read first, not scored; none if not given"
    )
    stride: int = Field(
        1,
        ge=1,
        description="recompute_window scores every stride-th token; other policies score all, and also keep sums over these",
    )
    until: Until | None = Field(
        None, description="stop reading as soon as the interval to a reference is this narrow; `tokens` is the limit"
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        length, shortest = self.tokens // (self.streams or 1), MIN_BLOCKS * MIN_BLOCK_TOKENS
        if self.side_by_side is not None and self.streams is None:
            raise ValueError("side_by_side says how many of the streams are read at once: give streams, too")
        if length < 2:
            raise ValueError(f"streams {self.streams:,} are too many for {self.tokens:,} tokens: each needs at least 2")
        if self.data in GENERATED and self.tokens > _MAX_GENERATED_TOKENS:
            raise ValueError(f"tokens {self.tokens:,} is more than the {_MAX_GENERATED_TOKENS:,} tokens that can be generated")
        if self.prompt is not None and self.prompt >= length:
            raise ValueError(f"prompt {self.prompt:,} leaves nothing to score in a stream of {length:,} tokens")
        if self.until is not None and self.streams is not None:
            raise ValueError("until reads one stream on: leave out streams")
        if self.until is not None and self.tokens <= shortest:
            raise ValueError(f"until needs more than {shortest:,} tokens: a text of {self.tokens:,} has no interval")
        return self


class FactCost(Part):
    """NLL of facts in generated prose, at one distance to their previous mention."""

    words_back: Annotated[list[Count] | None, EXACT] = Field(
        min_length=2, max_length=2, description="words since the previous mention, from and to; None: first mention"
    )
    tellings: Annotated[Positive, EXACT] = Field(description="number of mentions")
    nats: Annotated[Nats, near(RUN_NATS)] = Field(description="mean over mentions of the NLL summed over the fact's tokens")
    drawn_nats: Annotated[float, near(relative=SUM)] = Field(
        ge=0, le=700, description="mean logarithm of the number of possible facts"
    )


class PerplexityMetrics(NllMetrics):
    """Figures of the perplexity task."""

    bits_per_byte: Annotated[Number, near(relative=SUM)] = Field(description="bits per byte of the scored text")
    facts: Annotated[list[FactCost], EXACT] = Field(default_factory=list, description="NLL of facts in generated prose")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes allocated for K and V of all streams")

    def headline(self) -> str:
        """Return the perplexity over all tokens that the record scored."""
        return f"perplexity {digits(self.perplexity)}"


@dataclass(frozen=True)
class Precision:
    """Looks at the interval of the difference to the reference."""

    options: PerplexityOptions
    until: Until
    prefix: int  # tokens that open the stream
    tokens: int  # length of the whole text
    starts: Sequence[int]  # index of each text's first token in the stream
    capacity: int
    reference: NllMetrics  # figures of the reference on the whole text
    file: str  # file name of the reference's record

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of the text read at each planned look."""
        return look_lengths(self.tokens, self.capacity)

    def look(self, nll: NDArray[np.float32]) -> Look:
        """Compute the difference over the beginning of the text. nll: nats of the prefix and of the beginning. [N]."""
        read, whole = len(nll) - self.prefix, self.prefix + self.tokens
        figures = nll_figures(nll, self.prefix, self.starts, self.options.stride, prompt=self.options.prompt or 0, length=whole)
        so_far = NllMetrics.from_json(figures | {"tokens_read": read})
        change = mean_difference(so_far, self.reference, self.capacity, self.prefix, len(self.lengths))
        low, mean, high = (None, None, None) if change is None else (change.low, change.mean, change.high)
        return Look(tokens=read, mean=mean, low=low, high=high)

    def is_narrow(self, look: Look) -> bool:
        """Whether a look's interval is as narrow as `until` requires."""
        return look.low is not None and look.high is not None and look.high - look.low <= 2 * self.until.interval

    def looks(self, taken: Sequence[Look]) -> Looks:
        """Return the looks in the form that records keep, with the reason for stopping. taken: looks in order."""
        narrow = self.is_narrow(taken[-1])
        return Looks(
            reference=self.file,
            planned=len(self.lengths),
            taken=list(taken),
            reason="interval reached" if narrow else "limit reached",
        )
