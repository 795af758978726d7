"""A block through one layer by a compiled loop, and its cache in the layout that loop works on.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens, n tokens held, S slots, D head dim,
P = D / 2 pairs.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch
from torch import Tensor

from harness.engine.kernels.policy_cpu import function_of
from harness.engine.rotary import LONGEST_STREAM, rotate
from harness.engine.slots import Held, Rows, Slots
from policies import PositionMode
from policies.policy import mixed_seed

_FEWEST = 4  # tokens of a block from which on the loop is worth its copies
_LONGEST_TABLE = 2**18  # angles of a table
_ARRAYS, _NUMBERS = 10, 10  # arguments of the kernel: arrays, and integers before `initial`


class CompiledWalk:
    """The compiled walk of one policy over the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, kernel: Any) -> None:
        """As `of` makes it."""
        self._kernel, self._rotation = kernel, slots.shape.rotation
        self._in_stream = mode == "stream" and self._rotation is not None  # keys are turned once and for all
        self._turning, self._angles = 0, 0
        table = torch.ones(0, slots.shape.key_dim // 2, dtype=torch.complex64)
        if self._rotation is not None and not self._in_stream:
            self._turning, self._angles = (1, slots.empty) if mode == "cache" else (2, limit + 1)
            table = self._rotation.turns(torch.arange(self._angles), torch.float32, self._angles + 1)
        self._cosine, self._sine = table.real.T.contiguous(), table.imag.T.contiguous()  # of every angle. [P, angles]

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode, limit: int) -> Self | None:
        """None where there is none: for CPUs, up to 32 bits, and policies that can be traced."""
        fits = slots.capacity is not None and slots.shape.plain and slots.shape.key_dim % 2 == 0
        fits = fits and slots.keys.device.type == "cpu" and slots.keys.dtype.itemsize <= 4
        fits = fits and (mode != "clamped" or slots.shape.rotation is None or limit < _LONGEST_TABLE)
        kernel = function_of(slots.policy, "walk.c", "walk") if fits else None
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [
            *[ctypes.c_void_p] * _ARRAYS, *[ctypes.c_int64] * _NUMBERS, ctypes.c_float, *[ctypes.c_int64] * 6
        ]  # fmt: skip
        return cls(slots, mode, limit, kernel)

    @staticmethod
    def takes(tokens: int, seen: int | None) -> bool:
        """Whether it takes a block: streams of one length, and enough tokens."""
        return tokens >= _FEWEST and seen is not None

    def __call__(
        self, slots: Slots, rows: Rows, layer: int, query: Tensor, keys: Tensor, values: Tensor, held: Held, seen: int
    ) -> Tensor:
        """Walk a block; leaves the slots oldest first.

        Args:
            slots: of the layer.
            rows: of the layer.
            layer: its index in the model.
            query: rotated and scaled. [B, H, G, T, D].
            keys: unrotated. [B, H, T, D].
            values: [B, H, T, Dv].
            held: before the block.
            seen: tokens before the block.

        Returns:
            [B, H, G, T, Dv], dtype of the values.

        Raises:
            MemoryError: no scratch memory.
        """
        streams, heads, group, tokens, _ = query.shape
        places, capacity = slots.empty, slots.capacity or 0
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
        initial = next((s.initial for s in slots.states), 0.0)
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
            keys = rotate(keys, self._rotation.turns(positions, torch.float32, LONGEST_STREAM))
        return keys.unflatten(-1, (-1, 2))
