"""Blocks in closed form, where a policy keeps the first tokens and the newest ones: no walk, the same numbers.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens of the block, L keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.banded import Sinks, banded
from kvbench.harness.engine.rotary import Rotation, rotate
from kvbench.harness.engine.rows import Held, Rows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode


def closed_form(slots: Slots, mode: PositionMode, limit: int, rope_length: int) -> ClosedForm | None:
    """The closed form for the layers of one `Slots`; None where what they keep is not known beforehand.

    Args:
        slots: of the layers.
        mode: where RoPE puts a cached token.
        limit: the largest distance of mode `clamped`, in tokens.
        rope_length: bounds the positions that RoPE is asked for.
    """
    if slots.capacity is None or slots.tensors.states:
        return None
    if slots.shape.sliding_window is None:
        band = slots.policy.band(slots.capacity)
    elif slots.capacity == slots.shape.sliding_window - 1:  # the newest tokens: all others are out of every later query's sight
        band = (0, slots.capacity)
    else:
        band = None
    return None if band is None else ClosedForm(slots, mode, limit, rope_length, band)


class ClosedForm:
    """Blocks of the layers of one `Slots`, where `band` says what is kept."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, rope_length: int, band: tuple[int, int]) -> None:
        """Serve layers whose cache is `band`: (sinks, window), which sum to the capacity. Other arguments as in `closed_form`."""
        assert slots.capacity is not None
        self._rotation, self._capacity = slots.shape.rotation, slots.capacity
        self._mode, self._limit, self._rope_length = mode, limit, rope_length
        self._sinks, self._window = band

    def takes(self, tokens: int, seen: int) -> bool:
        """Whether RoPE puts every kept token at one place for the whole block."""
        if self._mode != "clamped" or self._rotation is None:
            return True
        crossing = seen + tokens > self._limit and seen < self._limit + self._sinks and self._sinks > 0
        return self._window <= self._limit and not crossing  # sinks reach the limit one by one: those blocks are walked

    def __call__(self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, held: Held, seen: int) -> Tensor:
        """A block through one layer; leaves the slots oldest first.

        Args:
            rows: of the layer, all slots.
            query: unrotated, unscaled. [B, H, G, T, D].
            keys: unrotated. [B, H, T, D].
            values: [B, H, T, Dv].
            terms: of this layer's attention.
            held: before the block.
            seen: tokens before the block.

        Returns:
            [B, H, G, T, Dv].
        """
        sinks, window, streams, tokens = self._sinks, self._window, query.shape[0], keys.shape[2]
        used = seen + tokens
        all_keys = torch.cat([held.keys.unflatten(0, (streams, -1)), keys], 2)
        all_values = torch.cat([held.values.unflatten(0, (streams, -1)), values], 2)
        gap = seen > self._capacity  # between the sinks and the window
        first = seen - window if gap else max(0, seen - window)
        near = slice(sinks if gap else first, None)
        first_tokens = None
        if sinks and used - 1 > window:
            first_tokens = Sinks(query, all_keys[:, :, :sinks], all_values[:, :, :sinks])
        near_query, near_keys = query, all_keys[:, :, near]
        if self._rotation is not None:
            at = torch.arange(near_keys.shape[2], device=keys.device)
            factors = self._rotation.factors(at, keys.dtype, near_keys.shape[2])
            near_query, near_keys = rotate(query, factors[-tokens:]), rotate(near_keys, factors)
            if first_tokens is not None:
                first_tokens = self._placed(first_tokens, seen, self._rotation)
        terms = terms._replace(sliding_window=None)
        out = banded(near_query, near_keys, all_values[:, :, near], window, first_tokens, terms, first)
        self._keep(rows, all_keys.flatten(0, 1), all_values.flatten(0, 1), used)
        return out

    def _placed(self, sinks: Sinks, seen: int, rotation: Rotation) -> Sinks:
        """The first tokens and the block's queries, rotated to where the position mode puts them."""
        count, tokens, dtype = sinks.keys.shape[2], sinks.query.shape[3], sinks.keys.dtype
        at = torch.arange(seen, seen + tokens, device=sinks.keys.device)
        key_at = torch.arange(count, device=sinks.keys.device)
        if self._mode == "cache":
            at = at.clamp(max=self._capacity)
        elif self._mode == "clamped" and seen >= self._limit:
            at, key_at = torch.full_like(at, self._limit), torch.zeros_like(key_at)
        query_factors, key_factors = (rotation.factors(x, dtype, self._rope_length) for x in (at, key_at))
        return Sinks(rotate(sinks.query, query_factors), rotate(sinks.keys, key_factors), sinks.values)

    def _keep(self, rows: Rows, keys: Tensor, values: Tensor, used: int) -> None:
        """What is held once the block is over. keys, values: all held and new. [N, L, D]."""
        kept = min(used, self._capacity)
        tail = kept if used <= self._capacity else self._window
        parts = [slice(0, kept - tail), slice(keys.shape[1] - tail, keys.shape[1])]
        first, last = torch.arange(kept - tail, device=keys.device), torch.arange(used - tail, used, device=keys.device)
        position = torch.cat([first, last]).expand(len(keys), -1)
        rows.put(torch.cat([keys[:, p] for p in parts], 1), torch.cat([values[:, p] for p in parts], 1), position)
