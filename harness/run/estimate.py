"""Rough estimates of a suite's time and memory: from the shapes of models, how fast this machine is, and short trials."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.device import best_seconds, multiply_rate, wait_for
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.resets import holds_kv, read_per_token
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST
from kvbench.harness.engine.model import Model
from kvbench.harness.models.hub import is_here, is_random, model_directory
from kvbench.harness.models.load import DTYPES, device_of, load_model
from kvbench.harness.models.shape import ModelShape, readable_shape
from kvbench.harness.suite import Cell
from kvbench.harness.suite.file import ModelSpec
from kvbench.policies.dense import Dense

_TRIED_BYTES = 2**30  # of weights: larger models, and those that must be downloaded, are not loaded for an estimate
_WALK_OPS = 35  # small tensor operations of the walk, per token and layer
_MODEL_OPS = 60  # small tensor operations of the model, per block and layer
_ENOUGH_SECONDS = 0.1  # of a read; a shorter one is followed by a longer one
_FIRST_TOKENS, _MOST_TOKENS = 8, 512  # of each stream, in a read
_SIDE_BY_SIDE = {"cpu": 20, "cuda": 4}
_DENSE = Dense()
_DENSE_TOKENS = 512  # that are cached where nothing bounds them


@dataclass(frozen=True)
class Estimate:
    """Seconds, bytes of K/V and of weights of one cell; None if the model's config is not available."""

    cell: Cell
    seconds: float | None
    kv_bytes: int | None
    weight_bytes: int | None

    def cells(self) -> dict[str, Any]:
        """The row to print."""
        return {
            "cell": self.cell.id[:8], "policy": self.cell.name, "capacity": self.cell.capacity,
            "about": None if self.seconds is None else f"{self.seconds:,.0f} s",
            "kv_bytes": self.kv_bytes, "weight_bytes": self.weight_bytes, "model": self.cell.model.id,
        }  # fmt: skip


def estimates(cells: Sequence[Cell], device_name: str, tried: bool = False) -> list[Estimate]:
    """An estimate for every cell on a device.

    `tried`: small models that are here are loaded, and read a few tokens under each policy. It takes seconds, and tells a policy
    whose loop is compiled from one whose loop is not.
    """
    device = device_of(device_name)
    rates: dict[str, float] = {}
    overhead = best_seconds(lambda: torch.ones(4, device=device).add_(1), device, 300)
    shapes = {spec: _shape(spec) for spec in dict.fromkeys(c.model for c in cells)}
    speeds = {spec: _speeds(spec, shape, device) for spec, shape in shapes.items() if tried and shape is not None}
    result = []
    for cell in cells:
        shape, dtype = shapes[cell.model], cell.model.dtype
        if shape is None:
            result.append(Estimate(cell, None, None, None))
            continue
        if dtype not in rates:
            rates[dtype] = multiply_rate(device, DTYPES[dtype])
        task, speed = plugins.task_class(cell.task.name), speeds.get(cell.model)
        streams = task.at_once(cell.task)
        rate = None if speed is None or task.of_device else speed.tokens_per_second(cell, streams)
        seconds = _seconds(cell, shape, rates[dtype], overhead) if rate is None else task.total(cell.task) / rate
        result.append(Estimate(cell, seconds, kv_bytes(cell, shape), shape.parameters * DTYPES[dtype].itemsize))
    return result


def _speeds(spec: ModelSpec, shape: ModelShape, device: torch.device) -> Speeds | None:
    """Trials on a model; None if it is large or not here, or can't be loaded: the run will say why."""
    if not is_here(spec.id) or shape.parameters * DTYPES[spec.dtype].itemsize > _TRIED_BYTES:
        return None
    try:
        return Speeds.of(spec, device)
    except UserError:
        return None


def _seconds(cell: Cell, shape: ModelShape, rate: float, overhead: float) -> float:
    """Of a cell, without a trial: products of matrices, and small operations of the walk."""
    task = plugins.task_class(cell.task.name)
    tokens = task.total(cell.task)
    attended = (cell.capacity or task.longest(cell.task)) + 1
    per_token = 2 * shape.parameters + 4 * shape.layers * shape.heads * shape.head_dim * attended
    if not holds_kv(cell.policy):
        return task.windows(cell.task) * attended * per_token / rate
    if not cell.policy.caches:
        return tokens * read_per_token(cell.policy, cell.capacity or 1) * per_token / rate
    walked = tokens if cell.policy.evicts else tokens / 256
    return tokens * per_token / rate + shape.layers * overhead * (_WALK_OPS * walked + _MODEL_OPS * tokens / 256)


def kv_bytes(cell: Cell, shape: ModelShape) -> int:
    """The most bytes of K and V that a cell holds, over all streams that must be read at once."""
    if not holds_kv(cell.policy):
        return 0
    task = plugins.task_class(cell.task.name)
    kept = cell.most_kept or task.longest(cell.task)
    return shape.kv_bytes(kept, task.at_once(cell.task), DTYPES[cell.model.dtype].itemsize, cell.kv)


def _shape(spec: ModelSpec) -> ModelShape | None:
    """The shape from the model's config; None if neither directory, cache nor hub has it."""
    shape = readable_shape(spec.id, spec.revision, spec.gguf_file)
    if shape is None:
        print(
            f"bench: {spec.id}: no estimates: its config is neither in the local cache nor reachable on the hub", file=sys.stderr
        )
    return shape


class _Asked(NamedTuple):
    """What the speed depends on, parameters of the policy apart."""

    policy: str
    capacity: int | None
    streams: int


class Speeds:
    """How fast this machine reads under policies on one model, each tried once: random tokens, full caches, a run's shortcuts."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[_Asked, float] = {}

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device) -> Self:
        """Those of a model, which is loaded.

        Raises:
            UserError: its files are not available, or it can't be driven exactly.
        """
        directory, random = model_directory(spec.id, spec.revision, spec.pickle, spec.gguf_file), is_random(spec.id)
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
