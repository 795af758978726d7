"""How fast this machine reads under a policy, from a short trial: random tokens, full caches, the shortcuts of a run."""

from __future__ import annotations

import time
from typing import NamedTuple, Self

import torch

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.device import wait_for
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST
from kvbench.harness.engine.model import Model
from kvbench.harness.models.hub import is_random, model_directory
from kvbench.harness.models.load import load_model
from kvbench.harness.suite import Cell
from kvbench.harness.suite.file import ModelSpec
from kvbench.policies.dense import Dense

_ENOUGH_SECONDS = 0.1  # of a read; a shorter one is followed by a longer one
_FIRST_TOKENS, _MOST_TOKENS = 8, 512  # of each stream, in a read
_SIDE_BY_SIDE = {"cpu": 20, "cuda": 4}
_DENSE = Dense()
_DENSE_TOKENS = 512  # that are cached where nothing bounds them


class _Asked(NamedTuple):
    """What the speed depends on, parameters of the policy apart."""

    policy: str
    capacity: int | None
    streams: int


class Speeds:
    """Speeds on one model, each tried once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[_Asked, float] = {}

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device) -> Self:
        """Those of a model, which is loaded.

        Raises:
            UserError: its files are not available, or it can't be driven exactly.
        """
        directory, random = model_directory(spec.id, spec.revision, spec.pickle), is_random(spec.id)
        return cls(load_model(directory, spec.dtype, device, spec.rope_length, spec.pickle, random=random, devices=spec.devices))

    @property
    def training_length(self) -> int | None:
        """Tokens; None if the model's config does not say."""
        return self._model.training_length

    @property
    def side_by_side(self) -> int:
        """Streams for a trial: fewer on a GPU, whose memory their caches might not fit into."""
        return _SIDE_BY_SIDE.get(self._model.device.type, 1)

    def tokens_per_second(self, cell: Cell, streams: int) -> float | None:
        """Of all streams together; None for what keeps no cache of ours."""
        if not cell.policy.caches or isinstance(cell.policy, Contestant):
            return None
        config, name = (
            CacheConfig(cell.policy, cell.capacity, cell.positions, cell.limit, cell.seed, cell.evict, cell.kv),
            cell.name,
        )
        if cell.evict == "prompt":  # which is read under full attention
            config, name = CacheConfig(_DENSE, None), "dense"
        asked = _Asked(f"{name} {config.kv or ''}", config.capacity, streams)
        if asked not in self._known:
            self._known[asked] = _tried(self._model, config, streams)
        return self._known[asked]


@torch.inference_mode()
def _tried(model: Model, config: CacheConfig, streams: int) -> float:
    """Tokens per second, in blocks that grow until one takes long enough to be timed."""
    decoder = CachedDecoder(model, config, streams, FASTEST)
    decoder.fill_randomly(_DENSE_TOKENS if config.capacity is None else config.capacity)
    tokens, is_warm = _FIRST_TOKENS, False
    while True:
        ids = torch.zeros(streams, tokens, dtype=torch.int64, device=model.device)
        wait_for(model.device)
        start = time.perf_counter()
        decoder(ids)
        wait_for(model.device)
        seconds = time.perf_counter() - start
        if is_warm and (seconds > _ENOUGH_SECONDS or tokens >= _MOST_TOKENS):
            return ids.numel() / seconds
        tokens, is_warm = min(_MOST_TOKENS, 4 * tokens if seconds < _ENOUGH_SECONDS else tokens), True
