"""A stream of tokens made from texts, and the account of which text it was."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE = 2**15  # characters tokenised at once, at least; at most twice as many
_PART = 2**20  # token ids looked at at once
# Where a text may be cut, the first of these that there is. Across the first two no tokenizer in use joins characters.
_CUTS = (re.compile(r"(?<=\n)(?=\S)"), re.compile(r"(?<=\w)(?= \w)"), re.compile(r"(?<=\S)(?=\s)"))


@dataclass(frozen=True)
class Text:
    """One book."""

    title: str
    text: str
    number: int | None = None  # in Project Gutenberg's catalogue


@dataclass(frozen=True)
class TokenStream:
    """Texts one after the other as one stream of tokens.

    Attributes:
        ids: the prefix, then the texts, nothing between them. [N] integers, on disk where they were made from texts.
        prefix: how many tokens open the stream and are never scored.
        byte_counts: UTF-8 bytes of text that each token stands for; 0 in the prefix. [N] integers, likewise.
        starts: (title, index of the first token) of every text.
        source: where the texts came from, in words.
        text_sha256: of the UTF-8 bytes of the text that the tokens cover.
    """

    ids: NDArray[np.integer[Any]]
    prefix: int
    byte_counts: NDArray[np.integer[Any]]
    starts: tuple[tuple[str, int], ...]
    source: str
    text_sha256: str

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the token ids."""
        return fingerprint(self.ids)

    @property
    def tokens(self) -> int:
        """The prefix not counted."""
        return len(self.ids) - self.prefix

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {
            "source": self.source,
            "text_sha256": self.text_sha256,
            "ids_sha256": self.ids_sha256,
            "tokens": self.tokens,
            "prefix": [int(i) for i in self.ids[: self.prefix]],
            "texts": [title for title, _ in self.starts],
        }


def fingerprint(ids: NDArray[np.integer[Any]]) -> str:
    """sha256 of token ids, as 64-bit integers."""
    found = hashlib.sha256()
    for start in range(0, len(ids), _PART):
        found.update(ids[start : start + _PART].astype("<i8").tobytes())
    return found.hexdigest()


class _OnDisk:
    """32-bit integers appended to a file that nobody else sees and that goes with them: a stream may be long."""

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # what is mapped stays

    def append(self, values: NDArray[np.int64]) -> None:
        """[n]."""
        self._file.write(values.astype(np.int32).tobytes())

    def mapped(self) -> NDArray[np.int32]:
        """All of them. [N]."""
        self._file.flush()
        return np.memmap(self._file, np.int32, "r+") if self._file.tell() else np.zeros(0, np.int32)


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What opens a stream: the BOS, or the sink tokens, that the tokenizer itself puts before a text."""
    put = list(tokenizer("", add_special_tokens=True)["input_ids"])
    if put[:1] != [tokenizer.bos_token_id]:
        return []
    behind = tokenizer.eos_token_id if tokenizer.eos_token_id != tokenizer.bos_token_id else None
    return put[: put.index(behind)] if behind in put else put


def newline(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token of a line end.

    Raises:
        UserError: the tokenizer has none that stands for it alone.
    """
    ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if not ids or tokenizer.decode(ids[-1:]) != "\n":
        raise UserError("this tokenizer has no token for a newline alone")
    return int(ids[-1])


def stream(
    texts: Iterable[Text],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    prefix: list[int] | None = None,
    short: bool = False,
) -> TokenStream:
    """The first `tokens` tokens of the texts, after a prefix.

    Each text is tokenised by itself, without special tokens; nothing is put between texts.

    Args:
        texts: one after the other.
        source: where they came from, in words.
        tokenizer: the model's.
        tokens: how many, prefix not counted.
        prefix: token ids that open the stream; the tokenizer's own BOS, if it has one, when None.
        short: take fewer tokens where the texts have fewer.

    Raises:
        UserError: the texts are shorter than that.
    """
    prefix = opening(tokenizer) if prefix is None else prefix
    starts, covered, missing = [], hashlib.sha256(), tokens
    with _OnDisk() as ids, _OnDisk() as counts:
        ids.append(np.array(prefix, np.int64))
        counts.append(np.zeros(len(prefix), np.int64))
        for text in texts:
            new, ends = tokenise(tokenizer, text.text, missing)
            starts.append((text.title, len(prefix) + tokens - missing))
            ids.append(new)
            counts.append(np.diff(ends, prepend=0))
            covered.update(text.text.encode()[: int(ends[-1])] if len(ends) else b"")
            missing -= len(new)
            if not missing:
                break
        if missing and (not short or missing == tokens):
            raise UserError(f"{source}: only {tokens - missing} tokens of text, {tokens} are asked for: set tokens lower")
        return TokenStream(ids.mapped(), len(prefix), counts.mapped(), tuple(starts), source, covered.hexdigest())


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """At most so many token ids of a text, and the UTF-8 byte of the text at which each ends.

    In pieces, because what a tokenizer returns takes kilobytes a token. A piece begins with the character that the one
    before it ended with, whose tokens are dropped again: so the tokens are those of the text as a whole. There are two
    exceptions. A tokenizer that looks ahead for the end of white space, as GPT-2's does, may put several line ends before
    a cut in other tokens. And in 32,768 characters without a blank between two words, the cut may be inside a token.
    """
    ids, ends, byte = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for overlap, piece in _pieces(text):
        encoded = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        stops = np.array([end for _, end in encoded["offset_mapping"]], np.int64).reshape(-1)
        byte_at = np.cumsum([0, *(len(c.encode()) for c in piece)])
        byte_at -= byte_at[overlap]
        new = stops > overlap if overlap else np.ones(len(stops), bool)
        ids.append(np.array(encoded["input_ids"], np.int64)[new])
        ends.append(byte + np.maximum.accumulate(byte_at[stops[new]]) if new.any() else stops[new])
        byte += int(byte_at[-1])
        most -= int(new.sum())
        if most <= 0:
            break
    whole = slice(None, most if most < 0 else None)
    return np.concatenate(ids)[whole], np.concatenate(ends)[whole]


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """The text in pieces, each with how many of its characters the piece before it has too."""
    start = overlap = 0
    while start < len(text):
        stop, apart = _cut(text, start)
        yield overlap, text[start - overlap : stop]
        start, overlap = stop, int(apart)


def _cut(text: str, start: int) -> tuple[int, bool]:
    """Where the piece that begins at `start` ends, and whether characters before and after it are in different tokens."""
    least, most = start + _PIECE, start + 2 * _PIECE
    for cut in _CUTS:
        if found := cut.search(text, least + 1, most):
            return found.start(), True
    return min(most, len(text)), False
