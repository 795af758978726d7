"""A stream of tokens made from texts, and the account of which text it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from harness.errors import UserError

_CHARACTERS_PER_TOKEN = 16  # read ahead of what a token can be expected to take


@dataclass(frozen=True)
class Text:
    """One book."""

    title: str
    text: str


@dataclass(frozen=True)
class TokenStream:
    """Texts one after the other as one stream of tokens.

    Attributes:
        ids: the prefix, then the texts, nothing between them. [N] int64.
        prefix: how many tokens open the stream and are never scored.
        byte_counts: UTF-8 bytes of text that each token stands for; 0 in the prefix. [N] int64.
        starts: (title, index of the first token) of every text.
        source: where the texts came from, in words.
        text_sha256: of the UTF-8 bytes of the text that the tokens cover.
    """

    ids: NDArray[np.int64]
    prefix: int
    byte_counts: NDArray[np.int64]
    starts: tuple[tuple[str, int], ...]
    source: str
    text_sha256: str

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the token ids."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {
            "source": self.source,
            "text_sha256": self.text_sha256,
            "ids_sha256": self.ids_sha256,
            "tokens": len(self.ids) - self.prefix,
            "prefix": [int(i) for i in self.ids[: self.prefix]],
            "texts": [title for title, _ in self.starts],
        }


def stream(texts: Iterable[Text], source: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> TokenStream:
    """The first `tokens` tokens of the texts, after the tokenizer's own BOS if it has one.

    Each text is tokenised by itself, without special tokens; nothing is put between texts.

    Raises:
        UserError: the texts are shorter than that.
    """
    opening = list(tokenizer("", add_special_tokens=True)["input_ids"])
    prefix = [tokenizer.bos_token_id] if opening[:1] == [tokenizer.bos_token_id] and opening else []
    ids, counts = [np.array(prefix, np.int64)], [np.zeros(len(prefix), np.int64)]
    starts, covered, missing = [], hashlib.sha256(), tokens
    for text in texts:
        new, ends = _tokens(tokenizer, text.text, missing)
        starts.append((text.title, len(prefix) + tokens - missing))
        ids.append(new)
        counts.append(np.diff(ends, prepend=0))
        covered.update(text.text.encode()[: int(ends[-1])] if len(ends) else b"")
        missing -= len(new)
        if not missing:
            break
    if missing:
        raise UserError(f"{source}: only {tokens - missing} tokens of text, {tokens} are asked for: set tokens lower")
    return TokenStream(np.concatenate(ids), len(prefix), np.concatenate(counts), tuple(starts), source, covered.hexdigest())


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """At most so many token ids of a text, and the UTF-8 byte of the text at which each ends."""
    for part in dict.fromkeys((text[: most * _CHARACTERS_PER_TOKEN], text)):
        encoded = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if len(encoded["input_ids"]) > most or part == text:  # a cut text may end in other tokens
            break
    ids = np.array(encoded["input_ids"][:most], np.int64)
    ends = np.array([end for _, end in encoded["offset_mapping"][:most]], np.int64).reshape(-1)
    byte_at = np.cumsum([0, *(len(c.encode()) for c in part[: int(ends.max(initial=0))])])
    return ids, np.maximum.accumulate(byte_at[ends]) if len(ends) else ends
