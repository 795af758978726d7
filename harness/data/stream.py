"""Streams of tokens made from texts, with fingerprints of the texts."""

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

_MIN_PIECE_CHARACTERS = 2**15  # characters tokenised at once; a piece has at most twice as many
_HASHED_AT_ONCE = 2**20
_WORD = "a"  # any text, to find the tokens that a tokenizer puts before a text
# Where to cut a text, in order of preference. No common tokenizer joins characters across the first two.
_CUTS = (re.compile(r"(?<=\n)(?=\S)"), re.compile(r"(?<=\w)(?= \w)"), re.compile(r"(?<=\S)(?=\s)"))


@dataclass(frozen=True)
class Text:
    """A text with a title, such as a book."""

    title: str
    text: str
    number: int | None = None  # number in Project Gutenberg's catalogue


@dataclass(frozen=True)
class TokenStream:
    """Concatenated texts, with nothing between them, as one stream of tokens."""

    ids: NDArray[np.integer[Any]]  # the prefix, then the texts. [N] integers; `stream` keeps them on disk
    prefix: int  # tokens that open the stream and are never scored
    byte_counts: NDArray[np.integer[Any]]  # UTF-8 bytes of text per token, 0 in the prefix. [N], also on disk
    starts: tuple[tuple[str, int], ...]  # (title, index of the first token) of every text
    source: str  # description of the source of the texts
    text_sha256: str  # sha256 of the UTF-8 bytes of the text that the tokens cover

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the token ids."""
        return fingerprint(self.ids)

    @property
    def tokens(self) -> int:
        """Tokens of text, the prefix not counted."""
        return len(self.ids) - self.prefix

    def facts(self) -> dict[str, Any]:
        """Return the facts about the data for the record."""
        return {
            "source": self.source,
            "text_sha256": self.text_sha256,
            "ids_sha256": self.ids_sha256,
            "tokens": self.tokens,
            "prefix": [int(i) for i in self.ids[: self.prefix]],
            "texts": [title for title, _ in self.starts],
        }


def fingerprint(ids: NDArray[np.integer[Any]]) -> str:
    """Return the sha256 of token ids, as 64-bit integers."""
    digest = hashlib.sha256()
    for start in range(0, len(ids), _HASHED_AT_ONCE):
        digest.update(ids[start : start + _HASHED_AT_ONCE].astype("<i8").tobytes())
    return digest.hexdigest()


class _DiskArray:
    """A growing array of 32-bit integers in a temporary file, for streams that are too long for memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - __exit__ closes it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # mapped arrays stay valid

    def append(self, values: NDArray[np.int64]) -> None:
        """Append values. [n]."""
        self._file.write(values.astype(np.int32).tobytes())

    def mapped(self) -> NDArray[np.int32]:
        """Return the whole array, mapped from disk. [N]."""
        self._file.flush()
        return np.memmap(self._file, np.int32, "r+") if self._file.tell() else np.zeros(0, np.int32)


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer itself puts before a text: a BOS, sink tokens, or a model's own marks."""
    alone, inside = (list(tokenizer(_WORD, add_special_tokens=special)["input_ids"]) for special in (False, True))
    before = range(len(inside) - len(alone) + 1)
    return next((inside[:count] for count in before if inside[count : count + len(alone)] == alone), [])


def newline(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token for a single newline.

    Raises:
        UserError: the tokenizer has no token for a single newline.
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
    """Return a stream of a prefix, by default the tokenizer's own BOS, and the first `tokens` tokens of the texts.

    Each text is tokenised by itself, without special tokens. Nothing is put between texts. If `short`, the texts may have fewer
    than `tokens` tokens.

    Raises:
        UserError: the texts have too few tokens.
    """
    prefix = opening(tokenizer) if prefix is None else prefix
    starts, covered, missing = [], hashlib.sha256(), tokens
    with _DiskArray() as ids, _DiskArray() as counts:
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
            raise UserError(f"{source}: has {tokens - missing} tokens of text, not the {tokens} asked for; set tokens lower")
        return TokenStream(ids.mapped(), len(prefix), counts.mapped(), tuple(starts), source, covered.hexdigest())


def tokenise(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first `most` token ids of a text, and the UTF-8 byte offset at which each token ends.

    The text is tokenised in pieces, because a tokenizer's output takes kilobytes per token. Each piece starts with the last
    character of the previous piece, and that character's tokens are dropped. This gives the tokens of the whole text, with two
    exceptions. A tokenizer that looks ahead to the end of white space, like GPT-2's, may split several newlines before a cut
    differently. A cut may fall inside a token if 32,768 characters have no space between two words.
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
    within_limit = slice(None, most if most < 0 else None)
    return np.concatenate(ids)[within_limit], np.concatenate(ends)[within_limit]


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Yield the pieces of a text, each with the number of characters that it shares with the previous piece (0 or 1)."""
    start = overlap = 0
    while start < len(text):
        stop, between_tokens = _cut(text, start)
        yield overlap, text[start - overlap : stop]
        start, overlap = stop, int(between_tokens)


def _cut(text: str, start: int) -> tuple[int, bool]:
    """Return the end of the piece that begins at `start`, and whether a token boundary is certain there."""
    least, most = start + _MIN_PIECE_CHARACTERS, start + 2 * _MIN_PIECE_CHARACTERS
    for cut in _CUTS:
        if match := cut.search(text, least + 1, most):
            return match.start(), True
    return min(most, len(text)), False
