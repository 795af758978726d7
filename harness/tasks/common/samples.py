"""Samples: consecutive pieces of running text of one length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import TokenStream, opening, stream
from kvbench.harness.data.texts import texts
from kvbench.harness.tasks.common.sample_options import SampleOptions
from kvbench.harness.tasks.task import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHECKED = 2048  # tokens of a sample


@dataclass(frozen=True)
class Samples:
    """Consecutive pieces of a text, each after the stream's prefix.

    Attributes:
        stream: prefix and text.
        length: tokens of a sample, its prefix and its end included.
        tokenizer: to show tokens.
        end: tokens that close every sample: the [SEP] of an encoder.
    """

    stream: TokenStream
    length: int
    tokenizer: PreTrainedTokenizerBase
    end: tuple[int, ...] = ()

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the token ids."""
        return self.stream.ids_sha256

    @property
    def tokens(self) -> int:
        """Tokens of text."""
        return self.stream.tokens

    def facts(self) -> dict[str, Any]:
        """Facts about the data, for the record."""
        return self.stream.facts()

    def inputs(self, start: int, stop: int) -> dict[str, Tensor]:
        """What the model reads: `input_ids` of the samples from `start` to `stop` - 1. [B, T] int64."""
        return {"input_ids": self.batch(start, stop)}

    def checked(self) -> dict[str, Tensor]:
        """The sample that the model's attention is checked with, cut to `MOST_CHECKED` tokens."""
        return {"input_ids": self.batch(0, 1)[:, :MOST_CHECKED]}

    def batch(self, start: int, stop: int) -> Tensor:
        """Token ids of the samples from `start` to `stop` - 1. [B, T] int64."""
        prefix, new = self.stream.prefix, self.length - self.stream.prefix - len(self.end)
        ids = torch.from_numpy(self.stream.ids[prefix + start * new : prefix + stop * new].copy()).long().view(-1, new)
        first = torch.from_numpy(self.stream.ids[:prefix].copy()).long().expand(len(ids), -1)
        return torch.cat([first, ids, torch.tensor([self.end] * len(ids), dtype=torch.int64).view(len(ids), -1)], 1)

    def text(self, sample: int, position: int) -> str:
        """A token as text."""
        return str(self.tokenizer.decode([int(self.batch(sample, sample + 1)[0, position])]))


def samples(options: SampleOptions, tokenizer: Tokenizer, directory: Path | None) -> Samples:
    """The first samples of the text.

    Raises:
        UserError: the text is missing or too short, or a sample has no room for a token of text.
    """
    loaded = tokenizer()
    prefix, end = _around(loaded)
    new = options.tokens - len(prefix) - len(end)
    if new < 1:
        raise UserError(f"tokens {options.tokens}: the tokenizer's own {len(prefix) + len(end)} tokens leave no room for text")
    source, books = texts(options.data, options.split, None, options.data_seed or 0, new * options.samples, directory)
    return Samples(stream(books, source, loaded, new * options.samples, prefix), options.tokens, loaded, tuple(end))


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens before and after every sample: those of an encoder ([CLS] and [SEP]), or what opens a text."""
    special = list(tokenizer("", add_special_tokens=True)["input_ids"])
    if len(special) == 2 and special == [tokenizer.cls_token_id, tokenizer.sep_token_id]:
        return special[:1], special[1:]
    return opening(tokenizer), []
