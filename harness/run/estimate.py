"""Estimates of a suite's time and memory: from the shapes of models and this machine's rates, or from short reads on a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvbench.harness.core.device import best_seconds, multiply_rate
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.resets import holds_kv, read_per_token
from kvbench.harness.models.hub import is_here
from kvbench.harness.models.load import DTYPES, device_of
from kvbench.harness.models.shape import ModelShape, readable_shape
from kvbench.harness.run.speeds import Speeds
from kvbench.harness.suite import Cell, labels
from kvbench.harness.suite.file import ModelSpec

_TRIED_BYTES = 2**30  # of weights; larger models, and models that must be downloaded, are not loaded for an estimate
_WALK_OPS = 35  # small tensor operations of the walk, per token and layer
_MODEL_OPS = 60  # small tensor operations of the model, per block and layer


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds, bytes of K/V and bytes of weights of one cell; None if the model's config is not available."""

    cell: Cell
    seconds: float | None
    kv_bytes: int | None
    weight_bytes: int | None


def estimate_rows(expected: Sequence[Estimate]) -> list[dict[str, Any]]:
    """Return the rows to print. Labels are those of the progress of a run."""
    names = labels([row.cell for row in expected])
    return [
        {
            "cell": row.cell.id[:8],
            "label": names[row.cell.id],
            "about": None if row.seconds is None else f"{row.seconds:,.0f} s",
            "kv_peak_bytes": row.kv_bytes,  # a cut prompt is whole until its end
            "weight_bytes": row.weight_bytes,
        }
        for row in expected
    ]


def estimates(cells: Sequence[Cell], device_name: str, tried: bool = False) -> list[Estimate]:
    """Estimate every cell on a device. tried: load small models that are on this machine, as `Estimator` does."""
    return Estimator(device_of(device_name), _TRIED_BYTES if tried else 0).estimates(cells)


class Estimator:
    """Estimates cells on a device. Loaded models and their measured speeds are kept."""

    def __init__(self, device: torch.device, largest: float, until: float = float("inf")) -> None:
        """Measure the speed of the device.

        Args:
            largest: maximum bytes of weights of a model that is loaded to read a few tokens under each policy, which takes a
                second or two per policy. Models that must be downloaded are loaded only if `largest` is infinite.
            until: moment of `time.monotonic` after which no more policies are tried.
        """
        self._device, self._largest, self._until = device, largest, until
        self._overhead = best_seconds(lambda: torch.ones(4, device=device).add_(1), device, 300)
        self._multiply_rate = cache(lambda dtype: multiply_rate(device, DTYPES[dtype]))
        self._shape = cache(_shape)
        self._speeds: dict[ModelSpec, Speeds | None] = {}

    @property
    def load_seconds(self) -> float:
        """Seconds spent on loading models."""
        return sum(speeds.load_seconds for speeds in self._speeds.values() if speeds is not None)

    def estimates(self, cells: Sequence[Cell]) -> list[Estimate]:
        """Estimate every cell. Cells with the same cache configuration share a check, which counts for the first cell."""
        checked = set[Any]()
        return [self._estimate(cell, checked) for cell in cells]

    def speeds(self, spec: ModelSpec) -> Speeds | None:
        """Return the speeds of a model; None if it is large, not on this machine, or can't be loaded.

        The run will report the reason that a model can't be loaded.
        """
        if spec not in self._speeds:
            shape, self._speeds[spec] = self._shape(spec), None
            here = is_here(spec.id)
            if shape is not None and _weight_bytes(spec, shape) <= self._largest and (here or self._largest == float("inf")):
                with suppress(UserError):
                    self._speeds[spec] = Speeds.of(spec, self._device, self._until)
        return self._speeds[spec]

    def _estimate(self, cell: Cell, checked: set[Any]) -> Estimate:
        shape = self._shape(cell.model)
        if shape is None:
            return Estimate(cell, None, None, None)
        seconds = self._measured_seconds(cell, checked)
        if seconds is None:
            seconds = _seconds(cell, shape, self._multiply_rate(cell.model.dtype), self._overhead)
        return Estimate(cell, seconds, cell.kv_bytes(shape), _weight_bytes(cell.model, shape))

    def _measured_seconds(self, cell: Cell, checked: set[Any]) -> float | None:
        """Return the seconds of a cell from short reads on its model; None without short reads."""
        speeds, work = self.speeds(cell.model), cell.workload
        rates = None if speeds is None else speeds.rates(cell, work.side_by_side, work.length)
        if speeds is None or rates is None:
            return None
        key = cell.model, repr(cell.policy), cell.capacity, cell.positions, cell.evict, cell.kv
        check = 0.0 if key in checked else speeds.check_seconds(rates)
        checked.add(key)
        return check + work.seconds(rates.token, rates.step)


def _shape(spec: ModelSpec) -> ModelShape | None:
    """Return the shape from the model's config; None, with a message, if neither directory, cache nor hub has a config."""
    shape = readable_shape(spec.id, spec.revision, spec.gguf_file)
    if shape is None:
        reason = "its config is neither in the local cache nor reachable on the hub"
        print(f"bench: {spec.id}: no estimates: {reason}", file=sys.stderr)
    return shape


def _weight_bytes(spec: ModelSpec, shape: ModelShape) -> int:
    return shape.parameters * DTYPES[spec.dtype].itemsize


def _seconds(cell: Cell, shape: ModelShape, rate: float, overhead: float) -> float:
    """Estimate a cell's seconds without a trial, from its matrix products and the small operations of the walk."""
    work = cell.workload
    tokens = work.tokens
    attended = (cell.capacity or work.length) + 1
    per_token = 2 * shape.parameters + 4 * shape.layers * shape.heads * shape.head_dim * attended
    if not holds_kv(cell.policy):
        return work.recomputed_windows * attended * per_token / rate
    if not cell.policy.caches:
        return tokens * read_per_token(cell.policy, cell.capacity or 1) * per_token / rate
    walked = tokens if cell.policy.evicts else tokens / 256
    return tokens * per_token / rate + shape.layers * overhead * (_WALK_OPS * walked + _MODEL_OPS * tokens / 256)
