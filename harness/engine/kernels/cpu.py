"""The kernels of `step.c`, `release.c` and `walk.c` as the walk calls them.

Axis letters: B streams, H KV heads, N = B * H, R rows of all layers, G query heads of a KV head, T tokens, n tokens held,
S slots looked at, L keys, D key dim, E value dim, P = D / 2 pairs.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.harness.engine.kernels.compiler import Built, built, built_of, why_untraced
from kvbench.harness.engine.rotary import LONGEST_STREAM, rotate
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode
from kvbench.policies.policy import mixed_seed

_MODES: dict[PositionMode, int] = {"cache": 0, "stream": 1, "clamped": 2}
_ALONE = 2**17  # products of a layer's scores below which one thread is quicker than several
_LONGEST_TABLE = 2**18  # angles of a table


class StepKernel:
    """The decode step of the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None, kernel: Any) -> None:
        """As `of` makes it."""
        self._kernel, self._mode, self._limit, self._longest = kernel, _MODES[mode], limit, longest
        self._order = torch.arange(slots.shape.key_dim) if slots.shape.rotation is None else slots.shape.rotation.order

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """None where there is none.

        Args:
            slots: of the layers.
            mode: where RoPE puts a cached token.
            limit: the largest distance of mode `clamped`, in tokens.
            longest: bounds the angles; the number of slots when None.
        """
        kernel = cls.built(slots).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 13, *[ctypes.c_int64] * 8, ctypes.c_float]
        return cls(slots, mode, limit, longest, kernel)

    @staticmethod
    def built(slots: Slots) -> Built:
        """Its function, for float32 and softmax of plain scores; neither it nor a reason for other layers."""
        shape = slots.shape
        if not shape.plain or slots.tensors.keys.dtype != torch.float32:
            return Built()
        sizes = (("GROUP", str(shape.group)), ("KEY_DIM", str(shape.key_dim)), ("VALUE_DIM", str(shape.value_dim)))
        return built("step.c", "step", sizes)

    def __call__(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float, mass: Tensor | None
    ) -> Tensor:
        """Take a token into one layer, each stream's; its rank and position are in its slot already.

        Args:
            slots: of the layer.
            rows: of the layer.
            query: unrotated, in the model's order of dims. [B, H * G, 1, D].
            key: likewise. [B, H, 1, D].
            value: [B, H, 1, E].
            scaling: of the scores.
            mass: where to put the softmax weights; None if nobody asks. [N, G, S].

        Returns:
            [B, H * G, 1, E].

        Raises:
            MemoryError: no scratch memory.
        """
        size, attended = rows.rank.shape
        low = high = None
        level = 1
        if slots.shape.rotation is not None:
            low, high, level = slots.shape.rotation.tables(torch.float32, self._longest or slots.num_slots + 1)
        out = torch.empty(*query.shape[:3], value.shape[-1])
        arrays = (
            query.contiguous(), key.contiguous(), value.contiguous(), self._order, rows.keys, rows.values, rows.rank,
            rows.position, rows.free, low, high, out, mass,
        )  # fmt: skip
        threads = torch.get_num_threads() if query.numel() * attended > _ALONE else 1
        failed = self._kernel(
            *(None if x is None else x.data_ptr() for x in arrays), size, rows.base, slots.num_slots, attended, self._mode,
            self._limit, level, min(threads, size), scaling,
        )  # fmt: skip
        if failed:
            raise MemoryError("no scratch memory for a decode step")
        return out


class ReleaseKernel:
    """The bookkeeping after a token, for all layers of one `Slots` at once."""

    def __init__(self, kernel: Any) -> None:
        """As `of` makes it."""
        self._kernel = kernel

    @classmethod
    def of(cls, slots: Slots) -> Self | None:
        """None where there is none."""
        kernel = cls.built(slots).function
        if kernel is None:
            return None
        kernel.restype = None
        kernel.argtypes = [*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 9]
        return cls(kernel)

    @staticmethod
    def built(slots: Slots) -> Built:
        """Its function, for float32 statistics and policies that can be traced; neither it nor a reason for others."""
        if slots.capacity is None or slots.wide != torch.float32 or why_untraced(slots.policy):
            return Built()
        return built_of(slots.policy, "release.c", "release")

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Statistics updated, and the next token's slot found.

        Args:
            slots: of the layers.
            rows: of all of them.
            mass: softmax weights, where the policy keeps a statistic. [R, G, S].
            step: of the token. [R] int64.
            full: every stream evicts a token; none does otherwise.
        """
        state = next(iter(slots.tensors.states.values()), None)
        arrays = (mass, state, slots.tensors.rank, slots.tensors.position, slots.layer_index, step, slots.tensors.free)
        self._kernel(
            *(None if x is None else x.data_ptr() for x in arrays), len(slots.tensors.rank), slots.streams * slots.shape.heads,
            slots.shape.heads, slots.shape.group, slots.num_slots, rows.rank.shape[1], int(full),
            slots.shape.sliding_window or 0, mixed_seed(slots.seed),
        )  # fmt: skip


class WalkKernel:
    """The compiled walk of one policy over the layers of one `Slots`."""

    leaves_ordered = True  # tokens lie oldest first afterwards

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, kernel: Any) -> None:
        """As `of` makes it."""
        self._kernel, self._rotation = kernel, slots.shape.rotation
        self._in_stream = mode == "stream" and self._rotation is not None  # keys are turned once and for all
        self._turning, self._angles = 0, 0
        table = torch.ones(0, slots.shape.key_dim // 2, dtype=torch.complex64)
        if self._rotation is not None and not self._in_stream:
            self._turning, self._angles = (1, slots.num_slots) if mode == "cache" else (2, limit + 1)
            table = self._rotation.factors(torch.arange(self._angles), torch.float32, self._angles + 1)
        self._cosine, self._sine = table.real.T.contiguous(), table.imag.T.contiguous()  # of every angle. [P, angles]

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """None where there is none."""
        kernel = cls.built(slots, mode, limit).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 10, *[ctypes.c_int64] * 10, ctypes.c_float, *[ctypes.c_int64] * 6]
        return cls(slots, mode, limit, kernel)

    @staticmethod
    def built(slots: Slots, mode: PositionMode, limit: int) -> Built:
        """Its function, for up to 32 bits and policies that can be traced; neither it nor a reason for others."""
        fits = slots.capacity is not None and slots.shape.plain and slots.shape.key_dim % 2 == 0
        fits = fits and slots.tensors.keys.dtype.itemsize <= 4 and not why_untraced(slots.policy)
        fits = fits and (mode != "clamped" or slots.shape.rotation is None or limit < _LONGEST_TABLE)
        return built_of(slots.policy, "walk.c", "walk") if fits else Built()

    def __call__(
        self, slots: Slots, rows: Rows, layer: int, query: Tensor, keys: Tensor, values: Tensor, ordered: bool, seen: int
    ) -> Tensor:
        """Walk a block of streams of one length.

        Args:
            slots: of the layer.
            rows: of the layer.
            layer: its index in the model.
            query: rotated and scaled. [B, H, G, T, D].
            keys: unrotated. [B, H, T, D].
            values: [B, H, T, Dv].
            ordered: the slots hold their tokens oldest first.
            seen: tokens before the block.

        Returns:
            [B, H, G, T, Dv], dtype of the values.

        Raises:
            MemoryError: no scratch memory.
        """
        streams, heads, group, tokens, _ = query.shape
        places, capacity = slots.num_slots, slots.capacity or 0
        held = rows.oldest_first(min(seen, capacity), ordered)
        count, size, pairs, dims = held.keys.shape[1], streams * heads, query.shape[-1] // 2, values.shape[-1]
        steps = torch.arange(seen, seen + tokens).expand(size, -1)
        all_keys, all_positions = torch.cat([held.keys, keys.flatten(0, 1)], 1), torch.cat([held.position, steps], 1)
        by_pair = self._turned(all_keys, all_positions)
        key_store, value_store = torch.empty(size, 2, pairs, places), torch.empty(size, dims, places)
        key_store[..., :count] = by_pair[:, :count].permute(0, 3, 2, 1)
        value_store[..., :count] = held.values.mT
        position, state = torch.zeros(size, places, dtype=torch.int64), torch.zeros(size, places)
        position[:, :count] = held.position
        if held.states:
            state[:, :count] = held.states[0]
        initial = next((s.initial for s in slots.tensors.states), 0.0)
        out = torch.empty(tokens, size, group, dims)
        arrays = [
            query.reshape(size, group, tokens, pairs, 2).permute(0, 2, 4, 3, 1).float().contiguous(),
            by_pair[:, count:].permute(0, 1, 3, 2).contiguous(), values.reshape(size, tokens, dims).float().contiguous(),
            key_store, value_store, position, state, self._cosine, self._sine, out,
        ]  # fmt: skip
        kept = self._kernel(
            *(x.data_ptr() for x in arrays), size, group, tokens, pairs, places, dims, count, seen, capacity,
            slots.shape.sliding_window or 0, initial, layer, heads, mixed_seed(slots.seed), self._turning, self._angles,
            torch.get_num_threads(),
        )  # fmt: skip
        if kept < 0:
            raise MemoryError("no scratch memory for the compiled walk")
        all_values = torch.cat([held.values, values.flatten(0, 1)], 1)
        survivors = torch.searchsorted(all_positions, position[:, :kept].contiguous())[..., None]
        rows.put(all_keys.take_along_dim(survivors, 1), all_values.take_along_dim(survivors, 1), position[:, :kept])
        for x in rows.states.values():
            flat = x.flatten(0, 1)
            flat[:, :kept], flat[:, kept:] = state[:, :kept], initial
        return out.to(values.dtype).view(tokens, streams, heads, group, dims).permute(1, 2, 3, 0, 4)

    def _turned(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys as the kernel takes them, their pairs apart. [N, L, D] -> [N, L, P, 2] float32."""
        keys = keys.float()
        if self._in_stream and self._rotation is not None:
            keys = rotate(keys, self._rotation.factors(positions, torch.float32, LONGEST_STREAM))
        return keys.unflatten(-1, (-1, 2))


def lost(slots: Slots, mode: PositionMode, limit: int) -> str:
    """Why a kernel that these layers and their policy could have is not there; empty if none is lost."""
    found = (StepKernel.built(slots), ReleaseKernel.built(slots), WalkKernel.built(slots, mode, limit))
    return next((one.why_not for one in found if one.why_not), "")
