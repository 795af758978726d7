"""The CUDA kernels, `triton_kernels.py`, with the interface that the walk calls and a policy's own expressions.

They need Triton, which comes with CUDA builds of PyTorch. Without it the plain code is used.

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

_MAX_BLOCK_ELEMENTS = 2048  # keys times query heads that a program holds; more would spill registers
_PROGRAMS_TO_FILL_CHIP = 528  # four for each multiprocessor of an H100
_MODES: dict[PositionMode, int] = {"cache": 1, "stream": 2, "clamped": 3}
_NO_TRITON = "Triton is not installed"
_BOOKKEEPING_BLOCK = 1024  # slots

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
    """The module with the kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from kvbench.harness.engine.kernels import triton_kernels

    return triton_kernels


@lru_cache
def _policy_module(importance: str, update: str) -> Any:
    """A module with a policy's expressions as Triton functions. It is a file, because Triton reads their source."""
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
    """Why a bound policy can't be put into a compiled walk; empty if it can."""
    try:
        traced(policy, TRITON)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return ""


def lost(slots: Slots, mode: PositionMode, limit: int) -> str:  # noqa: ARG001
    """Why kernels that support these layers can't be used; empty if they can."""
    return "" if _kernels() or not slots.shape.plain or slots.wide != torch.float32 else _NO_TRITON


@dataclass(frozen=True)
class _Rope:
    """RoPE for the kernels: the mode and the tables."""

    mode: int
    low: Tensor | None
    high: Tensor | None
    level: int  # rows of a table if two are needed; 0 if one is enough
    order: Tensor

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, longest: int | None) -> Self:
        """RoPE of some layers."""
        rotation, device = slots.shape.rotation, slots.tensors.keys.device
        if rotation is None:
            return cls(0, None, None, 0, torch.arange(slots.shape.key_dim, device=device))
        low, high, level = rotation.tables(torch.float32, longest or slots.num_slots + 1)
        return cls(_MODES[mode], low, high, 0 if high is None else level, rotation.order)


def _sizes(shape: LayerShape) -> dict[str, int]:
    """Constants of the kernels; those of blocks are powers of two."""
    group, pairs, wide = _next_power(shape.group), _next_power(ceil(shape.key_dim / 2)), _next_power(shape.value_dim)
    block = max(16, min(128, _MAX_BLOCK_ELEMENTS // (group * max(pairs, wide))))
    return {"G": shape.group, "GROUP": group, "D": shape.key_dim, "P": pairs, "E": shape.value_dim, "WIDE": wide, "BLOCK": block}


def _next_power(x: int) -> int:
    """The smallest power of two that is at least `x`."""
    return 1 << (x - 1).bit_length()


def _serves(slots: Slots) -> bool:
    return slots.shape.plain and slots.wide == torch.float32 and _kernels() is not None


class StepKernel:
    """The decode step of the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        self._mode, self._limit, self._longest = mode, limit, longest
        self._sizes = _sizes(slots.shape)
        self._rope, self._slots = _Rope.from_slots(slots, mode, longest), slots.num_slots

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """The kernel for layers with a plain softmax and up to 32 bits; None for others."""
        return cls(slots, mode, limit, longest) if _serves(slots) else None

    def __call__(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float, mass: Tensor | None
    ) -> Tensor:
        """Read a token of each stream in one layer. Arguments and result are those of the CPU kernel."""
        if slots.num_slots != self._slots:  # it has grown, perhaps past what one table holds
            self._rope, self._slots = _Rope.from_slots(slots, self._mode, self._longest), slots.num_slots
        size, attended = rows.rank.shape
        shape, rope, block = slots.shape, self._rope, self._sizes["BLOCK"]
        parts = max(1, min(ceil(attended / block), ceil(_PROGRAMS_TO_FILL_CHIP / size)))
        part = ceil(ceil(attended / parts) / block) * block
        parts = ceil(attended / part)
        parted = query.new_empty(size, parts, shape.group, shape.value_dim, dtype=torch.float32)
        most, total = (query.new_empty(size, parts, shape.group, dtype=torch.float32) for _ in range(2))
        scores = most if mass is None else mass
        out = query.new_empty(*query.shape[:3], shape.value_dim)
        low, high = (rows.keys if x is None else torch.view_as_real(x) for x in (rope.low, rope.high))
        _kernels().attend[(size, parts)](
            query.contiguous(), key.contiguous(), value.contiguous(), rope.order, rows.keys, rows.values, rows.rank,
            rows.position, rows.free, low, high, parted, most, total, scores, rows.base, slots.num_slots, attended, part,
            self._limit, scaling, MODE=rope.mode, LEVEL=rope.level, ASKED=mass is not None, **self._sizes,
        )  # fmt: skip
        blocks = 1 if mass is None else ceil(attended / _BOOKKEEPING_BLOCK)
        _kernels().join[(size * shape.group, blocks)](
            parted, most, total, scores, out, attended, PARTS=parts, POWER=_next_power(parts), G=shape.group,
            E=shape.value_dim, WIDE=self._sizes["WIDE"], BLOCK=_BOOKKEEPING_BLOCK, ASKED=mass is not None,
        )  # fmt: skip
        return out


class ReleaseKernel:
    """The bookkeeping after a token, for all layers of one `Slots` at once."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    @classmethod
    def from_slots(cls, slots: Slots) -> Self | None:
        """The kernel for a policy that can be traced; None for others."""
        fits = slots.capacity is not None and slots.wide == torch.float32 and not why_not(slots.policy)
        return cls(_policy_module(*traced(slots.policy, TRITON))) if fits else None

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Update the statistics and choose the next token's slot. The arguments are those of the CPU kernel."""
        tensors = slots.tensors
        state = next(iter(tensors.states.values()), None)
        attended, nothing = rows.rank.shape[1], tensors.free
        _kernels().release[(len(slots.tensors.rank),)](
            nothing if mass is None else mass, nothing if state is None else state, tensors.rank, tensors.position,
            slots.layer_index, step, tensors.free, slots.streams * slots.shape.heads, slots.shape.heads, slots.num_slots,
            attended, int(full), slots.shape.sliding_window or 0, mixed_seed(slots.seed), self._policy.update,
            self._policy.importance, G=slots.shape.group, GROUP=_next_power(slots.shape.group),
            BLOCK=min(_BOOKKEEPING_BLOCK, _next_power(attended)), STATE=state is not None,
        )  # fmt: skip


class WalkKernel:
    """The compiled walk of one policy over the layers of one `Slots`."""

    leaves_ordered = False  # tokens stay in their slots

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        self._policy = _policy_module(*traced(slots.policy, TRITON))
        self._rope, self._limit = _Rope.from_slots(slots, mode, longest), limit
        self._sizes = _sizes(slots.shape)

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """The kernel for layers with a plain softmax and up to 32 bits, and a traceable policy; None for others."""
        fits = slots.capacity is not None and _serves(slots) and not why_not(slots.policy)
        return cls(slots, mode, limit, longest) if fits else None

    def __call__(
        self, slots: Slots, rows: Rows, layer: int, query: Tensor, keys: Tensor, values: Tensor, ordered: bool, seen: int
    ) -> Tensor:
        """Walk a block of streams of equal length. Arguments and result are those of the CPU kernel."""
        streams, heads, group, tokens, _ = query.shape
        size, attended = rows.rank.shape
        rope, state = self._rope, next((x.flatten(0, 1) for x in rows.states.values()), None)
        scores = query.new_empty(size, group, attended, dtype=torch.float32)
        out = values.new_empty(size, group, tokens, values.shape[-1])
        low, high = (rows.keys if x is None else torch.view_as_real(x) for x in (rope.low, rope.high))
        initial = next((s.initial for s in slots.tensors.states), 0.0)
        _kernels().walk[(size,)](
            query.contiguous(), keys.contiguous(), values.contiguous(), rows.keys, rows.values, rows.rank, rows.position,
            rows.free if state is None else state, rows.free, low, high, scores, out, rows.base, slots.num_slots, attended,
            slots.capacity, seen, tokens, self._limit, slots.shape.sliding_window or 0, layer, heads, mixed_seed(slots.seed),
            float(initial), self._policy.update, self._policy.importance, MODE=rope.mode, LEVEL=rope.level,
            STATE=state is not None, **self._sizes,
        )  # fmt: skip
        return out.view(streams, heads, group, tokens, -1)
