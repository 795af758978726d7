"""Perplexity of a long text, read as one stream with a cache that is never reset.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.1 (PG19, books concatenated, token by token).
Differs: text is tokenised without special tokens and opened once by the tokenizer's own BOS (the release puts
one before every book); a block of tokens passes one layer at a time, which gives the same numbers.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from harness.data import pg19
from harness.data.facts import told
from harness.data.prose import Prose
from harness.data.stream import Text, TokenStream, newline, stream
from harness.tasks.task import Job, MeasurementError, Options, Task, Tokenizer

_CHARACTERS = 8  # of prose made for a token, more than any tokenizer of ours puts into one
_BLOCKS = 4096  # blocks whose sums the record keeps, at most
_SMALLEST_BLOCK = 32  # tokens
_FIRST_BUCKET = 256  # tokens; every further bucket of positions ends at the double


class PerplexityOptions(Options):
    """Options of the perplexity task."""

    name: Literal["perplexity"] = "perplexity"
    data: Literal["pg19", "prose"] = Field("pg19", description="the text: books, or prose generated here")
    split: Literal["train", "validation", "test"] = Field("test", description="of the data")
    tokens: int = Field(65536, ge=2, description="length of the stream in tokens, prefix not counted")
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


class Perplexity(Task):
    """NLL of every token given the stream before it, as far as the cache holds it."""

    options: ClassVar[type[Options]] = PerplexityOptions

    @staticmethod
    def data(options: PerplexityOptions, tokenizer: Tokenizer, directory: Path | None) -> TokenStream:
        """The books of the split, one after the other, or generated prose, up to `tokens`."""
        seed = options.data_seed or 0
        if options.data == "prose":
            prose = Text("prose", Prose(seed).text(_CHARACTERS * options.tokens))
            source, books = f"prose generated from seed {seed}", iter([prose])
        elif options.book is None:
            source, books = pg19.books(options.split, directory)
        else:
            source, books = pg19.book(options.book, options.split, directory)
        prefix = None if options.newlines is None else [newline(tokenizer())] * options.newlines
        return stream(books, source, tokenizer(), options.tokens, prefix, short=options.book is not None)

    @staticmethod
    def total(options: PerplexityOptions) -> int:
        """All of them are processed."""
        return options.tokens

    @classmethod
    def windows(cls, options: PerplexityOptions) -> float:
        """One a scored token."""
        return options.tokens / options.stride

    @staticmethod
    def run(options: PerplexityOptions, job: Job) -> dict[str, Any]:
        """Score the stream; the trace gets one float32 NLL a token, NaN where none was scored."""
        nll = np.lib.format.open_memmap(job.trace, mode="w+", dtype="<f4", shape=(len(job.data.ids),))
        nll[:] = np.nan
        kv_bytes, state_bytes = _score(options, job, nll)
        nll.flush()
        figures = summary(nll, job.data, options.stride, options.streams or 1)
        if options.data == "prose":
            figures["facts"] = told(nll, job.data.byte_counts, options.data_seed or 0)
        return {**figures, "kv_bytes": kv_bytes, "state_bytes": state_bytes}


def _score(options: PerplexityOptions, job: Job, nll: NDArray[np.float32]) -> tuple[int, int]:
    """Read the stream, or the streams side by side; writes each token's NLL in nats, returns the bytes held at the end."""
    prefix, streams = job.data.prefix, options.streams or 1
    text = torch.from_numpy(job.data.ids[prefix:])
    length = len(text) // streams
    opening = torch.from_numpy(job.data.ids[:prefix].copy()).expand(streams, -1)
    places = prefix + length * np.arange(streams)[:, None]  # of each stream's first token of text
    every = 1 if job.config.policy.caches else options.stride
    wanted = scored(prefix + length, prefix, every)
    read = job.decoder(streams)
    total, count = 0.0, 0

    def tokens(start: int, stop: int) -> Tensor:
        """Tokens of all streams, prefix included. [B, stop - start]."""
        body = torch.as_strided(text, (streams, length), (length, 1))
        return torch.cat([opening[:, start:stop], body[:, max(0, start - prefix) : max(0, stop - prefix)]], 1).long()

    end = prefix + length - 1  # nothing is asked after the last token
    for start in range(0, end, job.block):
        stop = min(start + job.block, end)
        at = np.flatnonzero(wanted[start + 1 : stop + 1])
        keep = None if len(at) == stop - start else torch.from_numpy(at).to(job.model.device)
        logits = read(tokens(start, stop).to(job.model.device), keep=keep)
        if not len(at):
            continue
        targets = tokens(start + 1, stop + 1)[:, at].to(job.model.device)
        losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").cpu().numpy()
        if not np.isfinite(losses).all():
            raise MeasurementError(f"NLL is not finite at token {start + 1 + int(at[~np.isfinite(losses)[: len(at)]][0])}")
        nll[places + (start + 1 - prefix + at)] = losses.reshape(streams, -1)
        total, count = total + float(losses.sum(dtype=np.float64)), count + losses.size
        job.progress(stop * streams, f"perplexity {math.exp(min(total / count, 700)):.2f}")
    return read.kv_bytes, read.state_bytes


def scored(length: int, prefix: int, every: int, streams: int = 1) -> NDArray[np.bool_]:
    """Which tokens are scored: all but the prefix and the very first of a stream, or every so-manieth of them. [N] bool."""
    part = (length - prefix) // streams
    first = 1 if not prefix else 0  # of a stream's text
    chosen = np.zeros(length, bool)
    for start in range(prefix, prefix + part * streams, part):
        chosen[start + first : start + part : every] = True
    return chosen


def summary(nll: NDArray[np.float32], text: TokenStream, stride: int, streams: int = 1) -> dict[str, Any]:
    """The record's figures from the trace.

    Args:
        nll: nats per token, NaN where not scored. [N].
        text: what was scored.
        stride: tokens between those that recompute-window scores.
        streams: that the text was cut in.

    Returns:
        tokens, nll (mean, nats), perplexity, bits_per_byte; `buckets` of positions in a stream; `blocks`: sums over short runs
        of positions, from which intervals and paired differences are computed; `on_stride`: the same on the tokens
        that every cell of the task scored, if those are fewer, runs and texts; `texts`: sums per book; `stream_tokens`:
        of text in each of several streams.
    """
    values, done = np.asarray(nll), np.isfinite(nll)
    mean = float(values[done].mean(dtype=np.float64))
    size = max(_SMALLEST_BLOCK, 2 ** math.ceil(math.log2(len(values) / _BLOCKS)))
    texts = np.array([start for _, start in text.starts])
    result: dict[str, Any] = {
        "tokens": int(done.sum()),
        "nll": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "bits_per_byte": float(values[done].sum(dtype=np.float64)) / math.log(2) / max(1, int(text.byte_counts[done].sum())),
        "buckets": _buckets(values, done, text.prefix, streams),
        "blocks": _sums(values, done, np.arange(0, len(values), size)) | {"size": size},
        "texts": _sums(values, done, texts),
    }
    if streams > 1:
        result["stream_tokens"] = (len(values) - text.prefix) // streams
    if stride > 1:
        shared = done & scored(len(values), text.prefix, stride, streams)
        blocks = _sums(values, shared, np.arange(0, len(values), size))
        result["on_stride"] = blocks | {"size": size, "texts": _sums(values, shared, texts)}
    return result


def _sums(values: NDArray[np.float32], done: NDArray[np.bool_], starts: NDArray[np.int64]) -> dict[str, Any]:
    """NLL summed, and tokens counted, over the runs that begin at `starts`."""
    sums = np.add.reduceat(np.where(done, values, np.float32(0)), starts, dtype=np.float64)
    return {"nll_sum": [round(float(x), 5) for x in sums], "tokens": np.add.reduceat(done.astype(int), starts).tolist()}


def _buckets(values: NDArray[np.float32], done: NDArray[np.bool_], prefix: int, streams: int) -> list[dict[str, Any]]:
    """Mean NLL by position in the stream; each bucket twice as long as all before it."""
    length = prefix + (len(values) - prefix) // streams
    place = np.arange(len(values), dtype=np.int32)
    place[prefix:] = prefix + (place[prefix:] - prefix) % (length - prefix)
    edges = [0, _FIRST_BUCKET]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    rows = []
    for low, high in itertools.pairwise(edges):
        part = done & (place >= low) & (place < high)
        if part.any():
            mean = float(values[part].mean(dtype=np.float64))
            rows.append({"from": low, "to": min(high, length), "tokens": int(part.sum()), "nll": mean})
    return rows
