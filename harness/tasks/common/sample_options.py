"""Options of the tasks that read samples: pieces of running text of one length, each with an empty cache."""

from __future__ import annotations

import itertools
from typing import Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.tasks.task import Options

_FIRST_BUCKET_TOKENS = 32  # each later bucket ends at twice the position of the one before


class SampleOptions(Options):
    """Which text is read, and into how many samples of which length it is cut."""

    data: Literal["pg19", "prose"] = Field("pg19", description="the text: books (pg19) or generated prose")
    split: Literal["train", "validation", "test"] = Field("test", description="split of the data")
    data_seed: int | None = Field(None, ge=0, description="seed of generated prose; 0 if not given")
    samples: int = Field(64, ge=1, le=100_000, description="pieces of the text that are looked at, one after the other")
    tokens: int = Field(128, ge=2, le=2**20, description="length of a sample, the tokens that open it included")
    prompt: int | None = Field(
        None,
        ge=1,
        description="first tokens of each sample that are its prompt, after which policies may evict; none if not given",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.prompt is not None and self.prompt >= self.tokens:
            raise ValueError(f"prompt {self.prompt:,} leaves nothing of a sample of {self.tokens:,} tokens")
        return self


def buckets(tokens: int) -> list[tuple[int, int]]:
    """Positions of a sample, cut where they double."""
    edges = [0]
    while edges[-1] < tokens:
        edges.append(min(tokens, max(_FIRST_BUCKET_TOKENS, 2 * edges[-1])))
    return list(itertools.pairwise(edges))
