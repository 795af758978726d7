"""Rough estimates of a suite's time and memory, from the shapes of models and how fast this machine is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.harness.core import plugins
from kvbench.harness.core.device import best_seconds, multiply_rate
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.resets import holds_kv, read_per_token
from kvbench.harness.models.hub import BUILTIN, is_random
from kvbench.harness.models.load import DTYPES, device_of
from kvbench.harness.models.shape import ModelShape, readable_shape
from kvbench.harness.run.speed import Speeds
from kvbench.harness.suite import Cell
from kvbench.harness.suite.file import ModelSpec

_TRIED_BYTES = 2**30  # of weights: larger models, and those that must be downloaded, are not loaded for an estimate
_WALK_OPS = 35  # small tensor operations of the walk, per token and layer
_MODEL_OPS = 60  # small tensor operations of the model, per block and layer


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
    here = is_random(spec.id) or spec.id.startswith(BUILTIN) or Path(spec.id).expanduser().is_dir()
    if not here or shape.parameters * DTYPES[spec.dtype].itemsize > _TRIED_BYTES:
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
    shape = readable_shape(spec.id, spec.revision)
    if shape is None:
        print(
            f"bench: {spec.id}: no estimates: its config is neither in the local cache nor reachable on the hub", file=sys.stderr
        )
    return shape
