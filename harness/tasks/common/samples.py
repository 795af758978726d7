"""Samples: consecutive pieces of running text of equal length, each read with an empty cache. Imports torch only for tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import TokenStream, opening, stream
from kvbench.harness.data.texts import Source, texts
from kvbench.harness.tasks.task import Options, Task, Tokenizer, Workload

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

MOST_CHECKED = 2048  # largest number of tokens of a sample in the check of a model's attention


class SampleOptions(Options):
    """Options that choose the text, and the number and length of its samples."""

    shown = ("data", "tokens", "samples", "prompt")

    data: Source = Field(
        "pg19", description="books (pg19), Wikipedia articles (wikitext), generated prose, or the words of Bigram-Backcopy"
    )
    split: Literal["train", "validation", "test"] = Field("test", description="split of the data")
    data_seed: int | None = Field(None, ge=0, description="seed of generated text; 0 if not given")
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


class SampleTask(Task):
    """A task that reads samples of books or of generated prose, one after the other."""

    @staticmethod
    def data(options: Any, tokenizer: Tokenizer, directory: Path | None) -> Any:
        """Return the `Samples`."""
        return samples(options, tokenizer, directory)

    @classmethod
    def workload(cls, options: Any) -> Workload:
        """Return samples that may begin with a prompt."""
        return Workload(sequences=options.samples, length=options.tokens, prompt=options.prompt or 0)


@dataclass(frozen=True, kw_only=True)
class Samples(TokenStream):
    """A stream that is read as consecutive samples, each after the stream's prefix."""

    length: int  # tokens of a sample, its prefix and its end included
    tokenizer: PreTrainedTokenizerBase
    end: tuple[int, ...] = ()  # tokens that close every sample: the [SEP] of an encoder

    def inputs(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the model inputs, `input_ids` of the samples from `start` to `stop` - 1. [B, T] int64."""
        return {"input_ids": self.batch(start, stop)}

    def checked(self) -> dict[str, Tensor]:
        """Return the sample with which the model's attention is checked, cut to `MOST_CHECKED` tokens."""
        return {"input_ids": self.batch(0, 1)[:, :MOST_CHECKED]}

    def batch(self, start: int, stop: int) -> Tensor:
        """Return the token ids of the samples from `start` to `stop` - 1. [B, T] int64."""
        import torch

        prefix, new = self.prefix, self.length - self.prefix - len(self.end)
        ids = torch.from_numpy(self.ids[prefix + start * new : prefix + stop * new].copy()).long().view(-1, new)
        first = torch.from_numpy(self.ids[:prefix].copy()).long().expand(len(ids), -1)
        return torch.cat([first, ids, torch.tensor([self.end] * len(ids), dtype=torch.int64).view(len(ids), -1)], 1)

    def text(self, sample: int, position: int) -> str:
        """Return a token as text."""
        return str(self.tokenizer.decode([int(self.batch(sample, sample + 1)[0, position])]))


def samples(options: SampleOptions, tokenizer: Tokenizer, directory: Path | None) -> Samples:
    """Return the first samples of the text.

    Raises:
        UserError: the text is missing or too short, or a sample has no room for a token of text.
    """
    loaded = tokenizer()
    prefix, end = _around(loaded)
    new = options.tokens - len(prefix) - len(end)
    if new < 1:
        raise UserError(f"tokens {options.tokens}: the tokenizer's own {len(prefix) + len(end)} tokens leave no room for text")
    source, books = texts(options.data, options.split, None, options.data_seed or 0, new * options.samples, directory)
    whole = stream(books, source, loaded, new * options.samples, prefix)
    return Samples(**vars(whole), length=options.tokens, tokenizer=loaded, end=tuple(end))


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens before and after every sample: an encoder's [CLS] and [SEP], or the tokens that open a text."""
    special = list(tokenizer("", add_special_tokens=True)["input_ids"])
    if len(special) == 2 and special == [tokenizer.cls_token_id, tokenizer.sep_token_id]:
        return special[:1], special[1:]
    return opening(tokenizer), []
