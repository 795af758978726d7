"""Perplexity of a long text, read as one stream with a cache that is never reset.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 4.1 (PG19, books concatenated, token by token).
Differs: text is tokenised without special tokens and opened once by the tokenizer's own BOS (the release puts
one before every book); a block of tokens passes one layer at a time, which gives the same numbers.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvbench.harness.data import pg19
from kvbench.harness.data.facts import told
from kvbench.harness.data.prose import Prose
from kvbench.harness.data.stream import Text, TokenStream, newline, stream
from kvbench.harness.records.aggregates import of_nll, scored
from kvbench.harness.tasks.task import LONGEST, Job, MeasurementError, Options, Task, Tokenizer

_MOST_PROSE = 2**24  # tokens: its text is made in memory
_CHARACTERS = 8  # of prose made for a token, more than any tokenizer of ours puts into one


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
    def streams(cls, options: PerplexityOptions) -> int:
        """The parts of the text that are read side by side."""
        return options.streams or 1

    @classmethod
    def windows(cls, options: PerplexityOptions) -> float:
        """One a scored token."""
        return options.tokens / options.stride

    @staticmethod
    def run(options: PerplexityOptions, job: Job) -> dict[str, Any]:
        """Score the stream; the trace gets one float32 NLL a token, NaN where none was scored."""
        nll = np.lib.format.open_memmap(job.trace, mode="w+", dtype="<f4", shape=(len(job.data.ids),))
        _take_room(job.trace)
        nll[:] = np.nan
        kv_bytes, state_bytes = _score(options, job, nll)
        nll.flush()
        figures = of_nll(
            nll, job.data.prefix, [start for _, start in job.data.starts], options.stride, Perplexity.streams(options)
        )
        done = np.isfinite(nll)
        figures["bytes"] = int(job.data.byte_counts[done].sum())  # of text that the scored tokens stand for
        figures["bits_per_byte"] = figures["nll"] * figures["tokens"] / math.log(2) / max(1, figures["bytes"])
        if options.data == "prose":
            figures["facts"] = told(nll, job.data.byte_counts, options.data_seed or 0)
        return {**figures, "kv_bytes": kv_bytes, "state_bytes": state_bytes}


def _take_room(file: Path) -> None:
    """A mapped file on a full disk would kill the process at some write: take its room now, and fail in words."""
    if hasattr(os, "posix_fallocate"):
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)


def _score(options: PerplexityOptions, job: Job, nll: NDArray[np.float32]) -> tuple[int, int]:
    """Read the stream, or the streams side by side; writes each token's NLL in nats, returns the bytes held at the end."""
    prefix, streams = job.data.prefix, Perplexity.streams(options)
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
