"""The kernels of `triton_kernels.py` as the walk calls them, with a policy's own expressions put in.

Needs Triton, which CUDA builds of PyTorch bring along; without it the plain code is used.

Axis letters: B streams, H KV heads, N = B * H, R rows of all layers, G query heads of a KV head, T tokens, S slots, D key dim,
E value dim.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.user_cache import private_folder
from kvbench.harness.engine.kernels.tracing import TRITON, NotTraceableError, traced
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import LayerShape, Slots
from kvbench.policies import Policy, PositionMode
from kvbench.policies.policy import mixed_seed

_BLOCK = 2048  # elements of a block of keys that a program holds, over query heads: more would spill registers
_PROGRAMS = 528  # that fill a chip: four for each of an H100's multiprocessors
_MODES: dict[PositionMode, int] = {"cache": 1, "stream": 2, "clamped": 3}
_NO_TRITON = "Triton is not installed"
_SETTLED = 1024  # slots that bookkeeping looks at at once

_POLICY = '''"""Made by kv-bench from a policy's `importance` and its statistic's `update`."""

import triton
import triton.language as tl

from kvbench.harness.engine.kernels.triton_kernels import uniform


@triton.jit
def importance(state, rank, position, step, layer, head, seed):
    return tl.cast(IMPORTANCE, tl.float32) + tl.zeros_like(state)


@triton.jit
def update(state, mass, rank, position, step, layer, head, seed):
    return tl.cast(UPDATE, tl.float32) + tl.zeros_like(state)
'''


@lru_cache
def _kernels() -> Any:
    """The module of the kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from kvbench.harness.engine.kernels import triton_kernels

    return triton_kernels


@lru_cache
def _policy_module(importance: str, update: str) -> Any:
    """A module with a policy's expressions as functions of Triton, which reads them from a file."""
    source = _POLICY.replace("IMPORTANCE", importance).replace("UPDATE", update)
    name = f"policy_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    path = private_folder("kernels") / f"{name}.py"
    with atomic_write(path) as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def why_not(policy: Policy) -> str:
    """Why a bound policy has no compiled walk here; empty if it has one."""
    return why_untraced(policy) or ("" if _kernels() else _NO_TRITON)


def why_untraced(policy: Policy) -> str:
    """What of a bound policy has no place in a compiled walk; empty if nothing."""
    try:
        traced(policy, TRITON)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return ""


def lost(slots: Slots, mode: PositionMode, limit: int) -> str:  # noqa: ARG001
    """As on CPUs."""
    return "" if _kernels() or not slots.shape.plain or slots.wide != torch.float32 else _NO_TRITON


@dataclass(frozen=True)
class _Turning:
    """Where the kernels find RoPE."""

    mode: int
    low: Tensor | None
    high: Tensor | None
    level: int  # rows of a table where two are needed; 0 where one will do
    order: Tensor

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode, longest: int | None) -> Self:
        """For these layers."""
        rotation, device = slots.shape.rotation, slots.tensors.keys.device
        if rotation is None:
            return cls(0, None, None, 0, torch.arange(slots.shape.key_dim, device=device))
        low, high, level = rotation.tables(torch.float32, longest or slots.num_slots + 1)
        return cls(_MODES[mode], low, high, 0 if high is None else level, rotation.order)


def _sizes(shape: LayerShape) -> dict[str, int]:
    """Constants of the kernels, in powers of two where blocks must be."""
    group, pairs, wide = _power(shape.group), _power(ceil(shape.key_dim / 2)), _power(shape.value_dim)
    block = max(16, min(128, _BLOCK // (group * max(pairs, wide))))
    return {"G": shape.group, "GROUP": group, "D": shape.key_dim, "P": pairs, "E": shape.value_dim, "WIDE": wide, "BLOCK": block}


def _power(x: int) -> int:
    return 1 << (x - 1).bit_length()


def _serves(slots: Slots) -> bool:
    return slots.shape.plain and slots.wide == torch.float32 and _kernels() is not None


class StepKernel:
    """The decode step of the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        """As `of` makes it."""
        self._mode, self._limit, self._longest = mode, limit, longest
        self._sizes = _sizes(slots.shape)
        self._turning, self._slots = _Turning.of(slots, mode, longest), slots.num_slots

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """None where there is none: it is for softmax of plain scores, up to 32 bits. As on CPUs otherwise."""
        return cls(slots, mode, limit, longest) if _serves(slots) else None

    def __call__(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float, mass: Tensor | None
    ) -> Tensor:
        """As on CPUs."""
        if slots.num_slots != self._slots:  # it has grown, perhaps past what one table holds
            self._turning, self._slots = _Turning.of(slots, self._mode, self._longest), slots.num_slots
        size, attended = rows.rank.shape
        shape, turning, block = slots.shape, self._turning, self._sizes["BLOCK"]
        parts = max(1, min(ceil(attended / block), ceil(_PROGRAMS / size)))
        part = ceil(ceil(attended / parts) / block) * block
        parts = ceil(attended / part)
        made = query.new_empty
        parted = made(size, parts, shape.group, shape.value_dim, dtype=torch.float32)
        most, total = (made(size, parts, shape.group, dtype=torch.float32) for _ in range(2))
        scores = most if mass is None else mass
        out = made(*query.shape[:3], shape.value_dim)
        low, high = (rows.keys if x is None else torch.view_as_real(x) for x in (turning.low, turning.high))
        _kernels().attend[(size, parts)](
            query.contiguous(), key.contiguous(), value.contiguous(), turning.order, rows.keys, rows.values, rows.rank,
            rows.position, rows.free, low, high, parted, most, total, scores, rows.base, slots.num_slots, attended, part,
            self._limit, scaling, MODE=turning.mode, LEVEL=turning.level, ASKED=mass is not None, **self._sizes,
        )  # fmt: skip
        blocks = 1 if mass is None else ceil(attended / _SETTLED)
        _kernels().join[(size * shape.group, blocks)](
            parted, most, total, scores, out, attended, PARTS=parts, POWER=_power(parts), G=shape.group, E=shape.value_dim,
            WIDE=self._sizes["WIDE"], BLOCK=_SETTLED, ASKED=mass is not None,
        )  # fmt: skip
        return out


class ReleaseKernel:
    """The bookkeeping after a token, for all layers of one `Slots` at once."""

    def __init__(self, policy: Any) -> None:
        """As `of` makes it."""
        self._policy = policy

    @classmethod
    def of(cls, slots: Slots) -> Self | None:
        """None where there is none: for policies that can be traced."""
        fits = slots.capacity is not None and slots.wide == torch.float32 and not why_not(slots.policy)
        return cls(_policy_module(*traced(slots.policy, TRITON))) if fits else None

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """As on CPUs."""
        tensors = slots.tensors
        state = next(iter(tensors.states.values()), None)
        attended, nothing = rows.rank.shape[1], tensors.free
        _kernels().release[(len(slots.tensors.rank),)](
            nothing if mass is None else mass, nothing if state is None else state, tensors.rank, tensors.position,
            slots.layer_index, step, tensors.free, slots.streams * slots.shape.heads, slots.shape.heads, slots.num_slots,
            attended, int(full), slots.shape.sliding_window or 0, mixed_seed(slots.seed), self._policy.update,
            self._policy.importance, G=slots.shape.group, GROUP=_power(slots.shape.group),
            BLOCK=min(_SETTLED, _power(attended)), STATE=state is not None,
        )  # fmt: skip


class WalkKernel:
    """The compiled walk of one policy over the layers of one `Slots`."""

    leaves_ordered = False  # tokens stay in their slots

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        """As `of` makes it."""
        self._policy = _policy_module(*traced(slots.policy, TRITON))
        self._turning, self._limit = _Turning.of(slots, mode, longest), limit
        self._sizes = _sizes(slots.shape)

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """None where there is none: for softmax of plain scores, up to 32 bits, and policies that can be traced."""
        fits = slots.capacity is not None and _serves(slots) and not why_not(slots.policy)
        return cls(slots, mode, limit, longest) if fits else None

    def __call__(
        self, slots: Slots, rows: Rows, layer: int, query: Tensor, keys: Tensor, values: Tensor, ordered: bool, seen: int
    ) -> Tensor:
        """As on CPUs."""
        streams, heads, group, tokens, _ = query.shape
        size, attended = rows.rank.shape
        turning, state = self._turning, next((x.flatten(0, 1) for x in rows.states.values()), None)
        scores = query.new_empty(size, group, attended, dtype=torch.float32)
        out = values.new_empty(size, group, tokens, values.shape[-1])
        low, high = (rows.keys if x is None else torch.view_as_real(x) for x in (turning.low, turning.high))
        initial = next((s.initial for s in slots.tensors.states), 0.0)
        _kernels().walk[(size,)](
            query.contiguous(), keys.contiguous(), values.contiguous(), rows.keys, rows.values, rows.rank, rows.position,
            rows.free if state is None else state, rows.free, low, high, scores, out, rows.base, slots.num_slots, attended,
            slots.capacity, seen, tokens, self._limit, slots.shape.sliding_window or 0, layer, heads, mixed_seed(slots.seed),
            float(initial), self._policy.update, self._policy.importance, MODE=turning.mode, LEVEL=turning.level,
            STATE=state is not None, **self._sizes,
        )  # fmt: skip
        return out.view(streams, heads, group, tokens, -1)
