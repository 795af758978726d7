"""Measure the speed of reading under a policy on one model, by short reads.

The time of a token is its time under full attention, in a block as large as in a run, plus the time that the policy adds. The
added time is the difference between two short reads: with a full cache, and with as many tokens under full attention. Each time
is the median of several interleaved reads, so that brief other work on the machine has little effect.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple, Self

import torch
from torch.nn.functional import cross_entropy

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.device import free_bytes, seconds_of
from kvbench.harness.core.evict import at_once
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST
from kvbench.harness.engine.model import Model
from kvbench.harness.models.hub import is_random, model_directory
from kvbench.harness.models.load import load_model
from kvbench.harness.suite import Cell
from kvbench.harness.suite.file import ModelSpec
from kvbench.policies.dense import Dense

_MOST_ROUNDS, _ROUNDS_SECONDS = 5, 0.5  # maximum repetitions of a read, and seconds of a read that is repeated once
_BLOCK_TOKENS = 256  # of the large block
_SHORT_TOKENS = 64  # of all streams together, in a short read
_ENOUGH_SECONDS = 0.02  # of a short read; a shorter one is repeated with more tokens
_MOST_SHORT_TOKENS = 128  # of each stream
_ROOM_TOKENS = 1024  # tokens that short reads may add to a filled cache
_MOST_STREAMS = {"cpu": 32, "cuda": 4}
_MOST_CACHE_BYTES = 2**28
_COPIES = 3  # of a cache that must fit: under the policy, under full attention, and during an extension
_CHECK_TOKENS, _MOST_CHECK_SECONDS = 700, 5.0  # of the check before a cell, as measured on SmolLM2
_DENSE = CacheConfig(Dense(), None)


class Rates(NamedTuple):
    """Seconds of reading under a cell's policy.

    Attributes:
        token: seconds of a token that is read in a block.
        step: seconds of a decode step of all streams side by side.
    """

    token: float
    step: float


class Speeds:
    """Speeds of one loaded model. Each speed is measured when it is first needed."""

    def __init__(self, model: Model, load_seconds: float = 0.0, until: float = float("inf")) -> None:
        """Wrap a model.

        until: moment of `time.monotonic` after which unmeasured policies get the rates of the slowest measured policy.
        """
        self.load_seconds = load_seconds
        self._model, self._until = model, until
        self._blocks: dict[int, float] = {}  # seconds per token under full attention, by tokens cached before
        self._added: dict[tuple[object, ...], Rates] = {}  # rates added by policies

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device, until: float = float("inf")) -> Self:
        """Load a model.

        Raises:
            UserError: the model's files are not available, or it can't be driven exactly.
        """
        start = time.perf_counter()
        directory, random = model_directory(spec.id, spec.revision, spec.pickle, spec.gguf_file), is_random(spec.id)
        model = load_model(directory, spec.dtype, device, spec.rope_length, spec.pickle, random=random, devices=spec.devices)
        return cls(model, time.perf_counter() - start, until)

    @property
    def training_length(self) -> int | None:
        """Longest position in training, in tokens; None if the model's config does not say."""
        return self._model.training_length

    def rates(self, cell: Cell, streams: int, length: int) -> Rates | None:
        """Return the rates of a cell with streams of `length` tokens.

        Returns None if no cache of ours is used, if the cache doesn't fit, or if the policy can't serve the model.
        """
        if not cell.policy.caches or isinstance(cell.policy, Contestant):
            return None
        if cell.evict == "prompt":  # prompts are read under full attention
            config = _DENSE
        else:
            config = CacheConfig(cell.policy, cell.capacity, cell.positions, cell.limit, cell.seed, cell.evict, cell.kv)
        held = length if config.capacity is None else min(length, config.capacity)
        if _COPIES * self._model.kv_bytes(max(1, held)) > free_bytes(self._model.device):
            return None
        try:
            added = self._adds(config, streams, held)
        except Exception:  # a policy that can't serve this model; the run will say why
            return None
        full = 1 - held / length if config.capacity is not None and config.kv is None else float(config.kv is not None)
        return Rates(self._block(held // 2) + full * added.token, added.step)

    def check_seconds(self, rates: Rates) -> float:
        """Return the seconds of the check before a cell. Cells with the same cache configuration share a check."""
        return min(_MOST_CHECK_SECONDS, _CHECK_TOKENS * rates.token)

    @torch.inference_mode()
    def _block(self, cached: int) -> float:
        """Measure the seconds per token of a large block under full attention, the loss included."""
        cached = 1 << max(0, cached // _BLOCK_TOKENS).bit_length()  # a few sizes, in blocks
        if cached not in self._blocks:
            read = self._filled(_DENSE, 1, (cached - 1) * _BLOCK_TOKENS)
            ids = torch.zeros(1, _BLOCK_TOKENS, dtype=torch.int64, device=self._model.device)
            loss = lambda: cross_entropy(read(ids).flatten(0, 1).float(), ids.flatten(), reduction="none")  # noqa: E731
            warm = seconds_of(loss, self._model.device)
            self._blocks[cached] = median(seconds_of(loss, self._model.device) for _ in range(self._rounds(warm))) / ids.numel()
        return self._blocks[cached]

    def _adds(self, config: CacheConfig, streams: int, held: int) -> Rates:
        """Return the seconds that a policy adds to a token read in a block, and the seconds of a decode step."""
        tokens = min(held, config.capacity or held)
        streams = max(1, min(streams, _MOST_STREAMS.get(self._model.device.type, 1), self._fitting(tokens)))
        key = repr(replace(config, seed=0)), streams, 0 if config.capacity is None else tokens
        if key not in self._added:
            if self._added and time.monotonic() > self._until:
                return max(self._added.values())
            self._added[key] = self._tried(config, streams, tokens)
        return self._added[key]

    @torch.inference_mode()
    def _tried(self, config: CacheConfig, streams: int, tokens: int) -> Rates:
        device, side_by_side = self._model.device, streams
        read = stepped = self._filled(config, streams, tokens)
        count = max(4, _SHORT_TOKENS // streams, min(_MOST_SHORT_TOKENS, at_once(config.evict)))
        if config.capacity is not None and all("compiled walk" in walk.offers for walk in read.walks):
            streams, count = 1, _MOST_SHORT_TOKENS  # it copies the cache once per block, which only a long block repays
            read = self._filled(config, streams, tokens)
        dense = self._filled(_DENSE, streams, tokens)
        while True:
            ids = torch.zeros(streams, count, dtype=torch.int64, device=device)
            warm, _ = (seconds_of(partial(decoder, ids), device) for decoder in (read, dense))
            if warm >= _ENOUGH_SECONDS or count >= _MOST_SHORT_TOKENS:
                break
            count = min(_MOST_SHORT_TOKENS, 4 * count)
        rounds = [[seconds_of(partial(decoder, ids), device) for decoder in (read, dense)] for _ in range(self._rounds(warm))]
        ours, full = (median(times) for times in zip(*rounds, strict=True))
        one = ids.new_zeros(side_by_side, 1)
        steps = [seconds_of(partial(stepped, one), device) for _ in range(1 + self._rounds(warm))]
        return Rates(max(0.0, ours - full) / ids.numel(), median(steps))

    @staticmethod
    def _rounds(seconds: float) -> int:
        """Return the number of repetitions of a read that takes this many seconds."""
        return max(1, min(_MOST_ROUNDS, int(_ROUNDS_SECONDS / seconds)))

    def _filled(self, config: CacheConfig, streams: int, tokens: int) -> CachedDecoder:
        """Create a decoder whose streams all hold the same random K and V."""
        decoder = CachedDecoder(self._model, config, 1, FASTEST)
        decoder.fill_randomly(max(0, min(tokens, self._model.longest - _ROOM_TOKENS)))
        return decoder if streams == 1 else decoder.fork([0] * streams)

    def _fitting(self, tokens: int) -> int:
        """Return the number of streams whose caches take little memory."""
        return int(_MOST_CACHE_BYTES // max(1, self._model.kv_bytes(max(1, tokens))))
