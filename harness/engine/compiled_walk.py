"""A block through one layer by a compiled loop, and its cache in the layout that loop works on.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens, n tokens held, S slots, D head dim,
P = D / 2 pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from harness.engine.attention import Terms
from harness.engine.compiled import compiled
from harness.engine.slots import Rows, Slots
from policies import PositionMode
from policies.policy import mixed_seed

_FEWEST = 4  # tokens of a block from which on the loop is worth its copies


class Held(NamedTuple):
    """What one layer holds, oldest first."""

    keys: Tensor  # [N, n, D]
    values: Tensor  # [N, n, Dv]
    position: Tensor  # [N, n] int64
    states: list[Tensor]  # one a statistic, [N, n] float32


class CompiledWalk:
    """The compiled walk of one policy over the layers of one `Slots`."""

    def __init__(self, slots: Slots, kernel: Any) -> None:
        """As `of` makes it."""
        self._slots, self._kernel = slots, kernel
        count, rotation = slots.empty, slots.shape.rotation
        if rotation is None:
            turns = torch.ones(count, slots.shape.key_dim // 2, dtype=torch.complex64)
        else:
            turns = rotation.turns(torch.arange(count), torch.float32, count + 1)
        self._cosine, self._sine = turns.real.T.contiguous(), turns.imag.T.contiguous()  # of every rank. [P, S]

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode) -> Self | None:
        """None where there is none: for CPUs, up to 32 bits, positions by rank, and policies that can be traced."""
        fits = slots.capacity is not None and (mode == "cache" or slots.shape.rotation is None)
        fits = fits and slots.keys.device.type == "cpu" and slots.keys.dtype.itemsize <= 4 and slots.shape.key_dim % 2 == 0
        kernel = compiled(slots.policy) if fits else None
        return None if kernel is None else cls(slots, kernel)

    @staticmethod
    def takes(tokens: int, seen: int | None, terms: Terms) -> bool:
        """Whether it takes a block: streams of one length, and nothing but softmax of scores."""
        return tokens >= _FEWEST and seen is not None and terms.softcap is None and terms.sink_logits is None

    def __call__(self, rows: Rows, layer: int, query: Tensor, keys: Tensor, values: Tensor, held: Held, seen: int) -> Tensor:
        """Walk a block; leaves the slots oldest first.

        Args:
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
        slots, capacity = self._slots.empty, self._slots.capacity or 0
        count, size, pairs, dims = held.keys.shape[1], streams * heads, query.shape[-1] // 2, values.shape[-1]
        wide = torch.float32
        key_store, value_store = torch.empty(size, 2, pairs, slots), torch.empty(size, dims, slots)
        key_store[..., :count] = held.keys.unflatten(-1, (pairs, 2)).permute(0, 3, 2, 1)
        value_store[..., :count] = held.values.mT
        position, state = torch.zeros(size, slots, dtype=torch.int64), torch.zeros(size, slots)
        position[:, :count] = held.position
        if held.states:
            state[:, :count] = held.states[0]
        initial = next((s.initial for s in self._slots.states), 0.0)
        out = torch.empty(tokens, size, group, dims)
        arrays = [
            query.reshape(size, group, tokens, pairs, 2).permute(0, 2, 4, 3, 1).to(wide).contiguous(),
            keys.reshape(size, tokens, pairs, 2).permute(0, 1, 3, 2).to(wide).contiguous(),
            values.reshape(size, tokens, dims).to(wide).contiguous(),
            key_store, value_store, position, state, self._cosine, self._sine, out,
        ]  # fmt: skip
        kept = self._kernel(
            *(x.data_ptr() for x in arrays), size, group, tokens, pairs, slots, dims, count, seen, capacity,
            self._slots.shape.sliding_window or 0, initial, layer, heads, mixed_seed(self._slots.seed), torch.get_num_threads(),
        )  # fmt: skip
        if kept < 0:
            raise MemoryError("no scratch memory for the compiled walk")
        rows.keys[:, :kept] = key_store[..., :kept].permute(0, 3, 2, 1).flatten(2)
        rows.values[:, :kept] = value_store[..., :kept].mT
        rows.position[:, :kept], rows.rank[:, :kept] = position[:, :kept], torch.arange(kept)
        rows.rank[:, kept:] = slots
        for x in rows.states.values():
            flat = x.flatten(0, 1)
            flat[:, :kept], flat[:, kept:] = state[:, :kept], initial
        rows.use(kept)
        return out.to(values.dtype).view(tokens, streams, heads, group, dims).permute(1, 2, 3, 0, 4)
