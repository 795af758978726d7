"""Closed form of blocks, for policies that keep the first and the newest tokens. Results agree with the walk.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens of the block, L keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.banded import Sinks, banded
from kvbench.harness.engine.held import Held
from kvbench.harness.engine.kernel_interface import flex_form
from kvbench.harness.engine.method import RAN
from kvbench.harness.engine.rotary import Rotation, rotate
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode

TILE = 128  # queries and keys of FlexAttention's tiles


def closed_form(slots: Slots, mode: PositionMode, limit: int, rope_length: int, flex: bool = False) -> ClosedForm | None:
    """Return the closed form for the layers of one `Slots`; None if the kept tokens are not known in advance.

    Args:
        rope_length: upper bound of the positions for which RoPE is computed.
        flex: compute blocks by FlexAttention where possible.
    """
    if slots.capacity is None or slots.tensors.states or not slots.evicts_each_step:
        return None
    if slots.shape.sliding_window is None:
        band = slots.policy.band(slots.capacity)
    elif slots.capacity == slots.shape.sliding_window - 1:  # no later query sees more than the newest tokens
        band = (0, slots.capacity)
    else:
        band = None
    if band is None:
        return None
    form = flex_form(slots, mode, limit, rope_length, band) if flex else None
    return form or ClosedForm(slots, mode, limit, rope_length, band)


class ClosedForm:
    """Closed form of blocks in the layers of one `Slots`, which keep sinks and a window of the newest tokens.

    Attributes:
        may_flex: blocks of whole tiles may go through FlexAttention.
    """

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, rope_length: int, band: tuple[int, int]) -> None:
        """Prepare for layers that keep a band. band: (sinks, window), in tokens; their sum is the capacity.

        Other arguments are those of `closed_form`.
        """
        assert slots.capacity is not None
        self._rotation, self._capacity = slots.shape.rotation, slots.capacity
        self._mode, self._limit, self._rope_length, self._keys_rotated = mode, limit, rope_length, slots.keys_rotated
        self._sinks, self._window = band
        self.may_flex = False

    def takes(self, tokens: int, tokens_before: int) -> bool:
        """Return whether the closed form can compute a block.

        In mode `clamped`, the window must lie within the limit, and no sink may reach the limit inside the block.
        """
        if self._mode != "clamped" or self._rotation is None:
            return True
        crossing = tokens_before + tokens > self._limit and tokens_before < self._limit + self._sinks and self._sinks > 0
        return self._window <= self._limit and not crossing  # sinks reach the limit one by one; such blocks are walked

    def __call__(
        self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, held: Held, tokens_before: int
    ) -> Tensor:
        """Read a block into one layer. Afterwards, the slots hold their tokens oldest first.

        Args:
            rows: rows of the layer, with all slots.
            query: unrotated, unscaled, dims in the model's order. [B, H, G, T, D].
            keys: unrotated, dims in the model's order. [B, H, T, D].
            values: [B, H, T, Dv].
            held: tokens held before the block.
            tokens_before: tokens before the block.

        Returns:
            [B, H, G, T, Dv].
        """
        RAN["closed form"] += 1
        return self._read(rows, query, keys, values, terms._replace(sliding_window=None), held, tokens_before, banded)

    def _read(
        self,
        rows: Rows,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        terms: Terms,
        held: Held,
        tokens_before: int,
        attend: Callable[[Tensor, Tensor, Tensor, int, Sinks | None, Terms, int], Tensor],
    ) -> Tensor:
        """`__call__` in PyTorch. attend: computes the banded attention; its arguments are those of `banded`."""
        if self._rotation is not None:
            query, keys = self._rotation.pair(query), self._rotation.pair(keys)
        sinks, streams, tokens = self._sinks, query.shape[0], keys.shape[2]
        used = tokens_before + tokens
        if self._rotation is not None and self._keys_rotated:
            own = self._rotation.factors(torch.arange(tokens_before, used, device=keys.device), keys.dtype, self._rope_length)
            query, keys = rotate(query, own), rotate(keys, own)
        all_keys = torch.cat([held.keys.unflatten(0, (streams, -1)), keys], 2)
        all_values = torch.cat([held.values.unflatten(0, (streams, -1)), values], 2)
        skipped, first = self._near(tokens_before)
        first_tokens = None
        if self._sees_sinks(used):
            first_tokens = Sinks(query, all_keys[:, :, :sinks], all_values[:, :, :sinks])
        near_query, near_keys = query, all_keys[:, :, skipped:]
        if self._rotation is not None and not self._keys_rotated:
            positions = torch.arange(near_keys.shape[2], device=keys.device)
            factors = self._rotation.factors(positions, keys.dtype, near_keys.shape[2])
            near_query, near_keys = rotate(query, factors[-tokens:]), rotate(near_keys, factors)
            if first_tokens is not None:
                query_factors, key_factors = self._far_factors(sinks, tokens, tokens_before, self._rotation, keys)
                first_tokens = Sinks(rotate(query, query_factors), rotate(first_tokens.keys, key_factors), first_tokens.values)
        near_values = all_values[:, :, skipped:]
        out = attend(near_query, near_keys, near_values, self._window, first_tokens, terms, first)
        self._keep(rows, all_keys.flatten(0, 1), all_values.flatten(0, 1), used)
        return out

    def _near(self, tokens_before: int) -> tuple[int, int]:
        """Return the first token in the window of the block's first query: index among the tokens held, and position."""
        if tokens_before > self._capacity:  # there is a gap between the sinks and the window
            return self._sinks, tokens_before - self._window
        first = max(0, tokens_before - self._window)
        return first, first

    def _sees_sinks(self, used: int) -> bool:
        """Return whether a query of the block that ends after `used` tokens sees sinks before its window."""
        return self._sinks > 0 and used - 1 > self._window

    def _far_factors(
        self, count: int, tokens: int, tokens_before: int, rotation: Rotation, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return RoPE of the block's queries and of the first `count` tokens, for the distances of the position mode.

        Returns:
            [T, P], [E, P].
        """
        query_positions = torch.arange(tokens_before, tokens_before + tokens, device=like.device)
        key_positions = torch.arange(count, device=like.device)
        if self._mode == "cache":
            query_positions = query_positions.clamp(max=self._capacity)
        elif self._mode == "clamped" and tokens_before >= self._limit:
            query_positions, key_positions = torch.full_like(query_positions, self._limit), torch.zeros_like(key_positions)
        length = self._rope_length
        return rotation.factors(query_positions, like.dtype, length), rotation.factors(key_positions, like.dtype, length)

    def _kept(self, used: int) -> tuple[int, int]:
        """Return the number of first tokens and the number of newest tokens that are kept after `used` tokens."""
        return (0, used) if used <= self._capacity else (self._capacity - self._window, self._window)

    def _positions(self, used: int, rows: Rows) -> Tensor:
        """Return the positions of the tokens that are kept, oldest first. [N, n] int64."""
        (head, tail), device = self._kept(used), rows.keys.device
        kept = torch.cat([torch.arange(head, device=device), torch.arange(used - tail, used, device=device)])
        return kept.expand(len(rows.keys), -1)

    def _keep(self, rows: Rows, keys: Tensor, values: Tensor, used: int) -> None:
        """Store the tokens that remain after the block. keys, values: K and V of all cached and new tokens. [N, L, D]."""
        head, tail = self._kept(used)
        parts = [slice(0, head), slice(keys.shape[1] - tail, keys.shape[1])]
        keys, values = (torch.cat([x[:, p] for p in parts], 1) for x in (keys, values))
        rows.put(keys, values, self._positions(used, rows))
