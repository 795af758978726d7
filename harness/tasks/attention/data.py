"""The samples that the attention task looks at: pieces of running text of one length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import TokenStream, opening, stream
from kvbench.harness.data.texts import texts
from kvbench.harness.tasks.attention.schema import AttentionOptions
from kvbench.harness.tasks.task import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Samples:
    """Consecutive pieces of a text, each after the stream's prefix.

    Attributes:
        stream: prefix and text.
        length: tokens of a sample, its prefix included.
        tokenizer: to show tokens.
    """

    stream: TokenStream
    length: int
    tokenizer: PreTrainedTokenizerBase

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the token ids."""
        return self.stream.ids_sha256

    @property
    def tokens(self) -> int:
        """Tokens to read."""
        return self.stream.tokens

    def facts(self) -> dict[str, Any]:
        """Facts about the data, for the record."""
        return self.stream.facts()

    def batch(self, start: int, stop: int) -> Tensor:
        """Token ids of the samples from `start` to `stop` - 1. [B, T] int64."""
        prefix, new = self.stream.prefix, self.length - self.stream.prefix
        ids = torch.from_numpy(self.stream.ids[prefix + start * new : prefix + stop * new].copy()).long().view(-1, new)
        first = torch.from_numpy(self.stream.ids[:prefix].copy()).long().expand(len(ids), -1)
        return torch.cat([first, ids], 1)

    def text(self, sample: int, position: int) -> str:
        """A token as text."""
        return str(self.tokenizer.decode([int(self.batch(sample, sample + 1)[0, position])]))


def samples(options: AttentionOptions, tokenizer: Tokenizer, directory: Path | None) -> Samples:
    """The first samples of the text.

    Raises:
        UserError: the text is missing or too short, or a sample has no room for a token of text.
    """
    loaded = tokenizer()
    new = options.tokens - len(opening(loaded))
    if new < 1:
        raise UserError(f"tokens {options.tokens}: the model's tokenizer opens a text with as many")
    source, books = texts(options.data, options.split, None, options.data_seed or 0, new * options.samples, directory)
    return Samples(stream(books, source, loaded, new * options.samples), options.tokens, loaded)
