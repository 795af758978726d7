"""Options and figures of the perplexity task."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.records.rules import BYTES, EXACT, RUN_NATS, SUM, near
from kvbench.harness.records.types import Count, Nats, Number, Part, Positive
from kvbench.harness.tasks.task import LONGEST, Options

_MOST_PROSE = 2**24  # tokens: its text is made in memory


class PerplexityOptions(Options):
    """Options of the perplexity task."""

    name: Literal["perplexity"] = "perplexity"
    data: Literal["pg19", "prose"] = Field("pg19", description="the text: books, or prose generated here")
    split: Literal["train", "validation", "test"] = Field("test", description="of the data")
    tokens: int = Field(65536, ge=2, le=LONGEST, description="length of the stream in tokens, prefix not counted")
    book: int | None = Field(
        None, ge=1, description="only the book of this number in Project Gutenberg's catalogue, up to `tokens`"
    )
    data_seed: int | None = Field(None, ge=0, description="of generated prose; 0 when not given")
    newlines: int | None = Field(None, ge=1, description="so many newline tokens open the stream in place of the tokenizer's BOS")
    streams: int | None = Field(
        None, ge=1, description="cut the text in so many streams of one length, read side by side, each opened by the prefix"
    )
    stride: int = Field(
        1, ge=1, description="recompute_window scores every stride-th token; the others score all, and keep sums on the same"
    )

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        if self.data == "prose" and self.tokens > _MOST_PROSE:
            raise ValueError(f"tokens {self.tokens:,} are more than the {_MOST_PROSE:,} of prose that can be generated")
        return self


class FactCost(Part):
    """What the facts of prose cost, told so many words ago."""

    words_back: Annotated[list[Count] | None, EXACT] = Field(
        min_length=2, max_length=2, description="from, to; None: told for the first time"
    )
    tellings: Annotated[Positive, EXACT] = Field(description="facts told")
    nats: Annotated[Nats, near(RUN_NATS)] = Field(description="mean over tellings, summed over the tokens of the fact's words")
    drawn_nats: Annotated[float, near(relative=SUM)] = Field(ge=0, le=700, description="mean logarithm of the choices")


class PerplexityMetrics(NllMetrics):
    """Figures of the perplexity task."""

    bits_per_byte: Annotated[Number, near(relative=SUM)] = Field(description="of the scored text")
    facts: Annotated[list[FactCost], EXACT] = Field(default_factory=list, description="what facts of generated prose cost")
    kv_bytes: Annotated[Count, BYTES] = Field(description="bytes of K and V held")
