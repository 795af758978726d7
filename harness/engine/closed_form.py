"""Blocks in closed form, where a policy keeps the first tokens and the newest ones: no walk, the same numbers.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens of the block, L keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.banded import Rope, Sinks, banded
from kvbench.harness.engine.held import Held
from kvbench.harness.engine.method import RAN
from kvbench.harness.engine.rotary import Rotation, rotate
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import LayerShape, Slots
from kvbench.harness.kernels import rope
from kvbench.harness.kernels.flex import TILE, can_be_flex, whole_tiles
from kvbench.policies import PositionMode


def closed_form(slots: Slots, mode: PositionMode, limit: int, rope_length: int, flex: bool = False) -> ClosedForm | None:
    """The closed form for the layers of one `Slots`; None where what they keep is not known beforehand.

    Args:
        mode: where RoPE puts a cached token.
        limit: the largest distance of mode `clamped`, in tokens.
        rope_length: bounds the positions that RoPE is asked for.
        flex: compute blocks by FlexAttention where it serves.
    """
    if slots.capacity is None or slots.tensors.states or not slots.evicts_each_step:
        return None
    if slots.shape.sliding_window is None:
        band = slots.policy.band(slots.capacity)
    elif slots.capacity == slots.shape.sliding_window - 1:  # the newest tokens: all others are out of every later query's sight
        band = (0, slots.capacity)
    else:
        band = None
    return None if band is None else ClosedForm(slots, mode, limit, rope_length, band, flex)


class ClosedForm:
    """Blocks of the layers of one `Slots`, where `band` says what is kept."""

    def __init__(
        self, slots: Slots, mode: PositionMode, limit: int, rope_length: int, band: tuple[int, int], flex: bool
    ) -> None:  # fmt: skip
        """Serve layers whose cache is `band`: (sinks, window), which sum to the capacity. Other arguments as in `closed_form`."""
        assert slots.capacity is not None
        self._rotation, self._capacity = slots.shape.rotation, slots.capacity
        self._mode, self._limit, self._rope_length, self._keys_rotated = mode, limit, rope_length, slots.keys_rotated
        self._sinks, self._window = band
        self._flex = flex

    def may_flex(self, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether blocks of whole tiles may go through FlexAttention, in layers of this shape."""
        if not (self._flex and shape.plain):
            return False
        query = torch.empty(1, 1, 1, TILE, shape.key_dim, dtype=dtype, device=device)
        return can_be_flex(query, query.new_empty(1, shape.value_dim), Terms(1.0))

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
            query: unrotated, unscaled, dims in the model's order. [B, H, G, T, D].
            keys: unrotated, dims in the model's order. [B, H, T, D].
            values: [B, H, T, Dv].
            held: before the block.
            seen: tokens before the block.

        Returns:
            [B, H, G, T, Dv].
        """
        by_flex, terms = self._flex and can_be_flex(query, values, terms), terms._replace(sliding_window=None)
        RAN["FlexAttention" if by_flex else "closed form"] += 1
        if by_flex and rope.serves(query):
            return self._by_kernel(rows, query, keys, values, terms, held, seen)
        return self._plainly(rows, query, keys, values, terms, held, seen, by_flex)

    def _plainly(
        self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, held: Held, seen: int, by_flex: bool
    ) -> Tensor:  # fmt: skip
        """`__call__` in plain PyTorch. by_flex: the window's attention by FlexAttention."""
        if self._rotation is not None:
            query, keys = self._rotation.pair(query), self._rotation.pair(keys)
        sinks, streams, tokens = self._sinks, query.shape[0], keys.shape[2]
        used = seen + tokens
        if self._rotation is not None and self._keys_rotated:
            own = self._rotation.factors(torch.arange(seen, used, device=keys.device), keys.dtype, self._rope_length)
            query, keys = rotate(query, own), rotate(keys, own)
        all_keys = torch.cat([held.keys.unflatten(0, (streams, -1)), keys], 2)
        all_values = torch.cat([held.values.unflatten(0, (streams, -1)), values], 2)
        skipped, first = self._near(seen)
        first_tokens = None
        if self._sees_sinks(used):
            first_tokens = Sinks(query, all_keys[:, :, :sinks], all_values[:, :, :sinks])
        near_query, near_keys = query, all_keys[:, :, skipped:]
        if self._rotation is not None and not self._keys_rotated:
            at = torch.arange(near_keys.shape[2], device=keys.device)
            factors = self._rotation.factors(at, keys.dtype, near_keys.shape[2])
            near_query, near_keys = rotate(query, factors[-tokens:]), rotate(near_keys, factors)
            if first_tokens is not None:
                query_factors, key_factors = self._far_factors(sinks, tokens, seen, self._rotation, keys)
                first_tokens = Sinks(rotate(query, query_factors), rotate(first_tokens.keys, key_factors), first_tokens.values)
        near_values = all_values[:, :, skipped:]
        out = banded(near_query, near_keys, near_values, self._window, first_tokens, terms, first, by_flex=by_flex)
        self._keep(rows, all_keys.flatten(0, 1), all_values.flatten(0, 1), used)
        return out

    def _by_kernel(self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, held: Held, seen: int) -> Tensor:
        """`__call__` on CUDA: what FlexAttention reads and the slots keep is written once, from where it is."""
        (query, halves), (keys, _) = rope.pairing(self._rotation, query), rope.pairing(self._rotation, keys)
        (streams, heads, tokens, dim), (skipped, first) = keys.shape, self._near(seen)
        old_keys, old_values = held.keys.unflatten(0, (streams, -1)), held.values.unflatten(0, (streams, -1))
        before = old_keys.shape[2] - skipped
        length = before + tokens
        old, new = self._near_factors(before, tokens, seen, keys)
        near_query = query.new_empty(query.shape)
        near_keys, near_values = (keys.new_empty(streams, heads, whole_tiles(length), dim) for _ in range(2))
        rope.rotate_into(near_query.flatten(1, 2), query.flatten(1, 2), new, halves)
        rope.rotate_into(near_keys[:, :, :before], old_keys[:, :, skipped:], old)
        rope.rotate_into(near_keys[:, :, before:length], keys, new, halves)
        near_values[:, :, :before], near_values[:, :, before:length] = old_values[:, :, skipped:], values
        near_keys[:, :, length:], near_values[:, :, length:] = 0, 0
        sinks = None
        if self._sees_sinks(seen + tokens):
            sinks = self._unrotated_sinks(query, keys, values, old_keys, old_values, seen, halves)
        padding = near_keys.shape[2] - length
        out = banded(near_query, near_keys, near_values, self._window, sinks, terms, first, padding, by_flex=True)
        self._keep_from(rows, held, keys, values, seen + tokens, halves, new if self._keys_rotated else None)
        return out

    def _near_factors(self, before: int, tokens: int, seen: int, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """RoPE of `before` keys held and of the block, at equal distances from each other; None if they need none. [n, P]."""
        if self._rotation is None:
            return None, None
        if self._keys_rotated:
            at = torch.arange(seen, seen + tokens, device=like.device)
            return None, self._rotation.factors(at, like.dtype, self._rope_length)
        factors = self._rotation.factors(torch.arange(before + tokens, device=like.device), like.dtype, before + tokens)
        return factors[:before], factors[before:]

    def _near(self, seen: int) -> tuple[int, int]:
        """The first token that the block's first query sees in its window: its index among those held, and its position."""
        if seen > self._capacity:  # there is a gap between the sinks and the window
            return self._sinks, seen - self._window
        first = max(0, seen - self._window)
        return first, first

    def _sees_sinks(self, used: int) -> bool:
        """Whether a query of the block that ends after `used` tokens sees sinks apart from its window."""
        return self._sinks > 0 and used - 1 > self._window

    def _unrotated_sinks(
        self, query: Tensor, keys: Tensor, values: Tensor, old_keys: Tensor, old_values: Tensor, seen: int, halves: int
    ) -> Sinks:
        """The first tokens, rotated, for queries that are not. keys, values: of the block; old: held before."""
        count, tokens = self._sinks, keys.shape[2]
        missing = max(0, count - old_keys.shape[2])
        first_keys = keys.new_empty(*keys.shape[:2], count, keys.shape[3])
        query_factors, old, new = None, None, None
        if self._rotation is not None:
            query_factors, factors = self._far_factors(count, tokens, seen, self._rotation, keys)
            old, new = None if self._keys_rotated else factors[: count - missing], factors[count - missing :]
        rope.rotate_into(first_keys[:, :, : count - missing], old_keys[:, :, :count], old)
        rope.rotate_into(first_keys[:, :, count - missing :], keys[:, :, :missing], new, halves)
        first_values = torch.cat([old_values[:, :, :count], values[:, :, :missing]], 2)
        return Sinks(query, first_keys, first_values, Rope(query_factors, halves))

    def _far_factors(self, count: int, tokens: int, seen: int, rotation: Rotation, like: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE of the block's queries and of the first `count` tokens, where the position mode puts them. [T, P], [E, P]."""
        at, key_at = torch.arange(seen, seen + tokens, device=like.device), torch.arange(count, device=like.device)
        if self._mode == "cache":
            at = at.clamp(max=self._capacity)
        elif self._mode == "clamped" and seen >= self._limit:
            at, key_at = torch.full_like(at, self._limit), torch.zeros_like(key_at)
        query_factors, key_factors = (rotation.factors(x, like.dtype, self._rope_length) for x in (at, key_at))
        return query_factors, key_factors

    def _kept(self, used: int) -> tuple[int, int]:
        """After `used` tokens: how many of the first tokens are kept, and how many of the newest."""
        return (0, used) if used <= self._capacity else (self._capacity - self._window, self._window)

    def _positions(self, used: int, rows: Rows) -> Tensor:
        """Return the positions of the tokens that are kept, oldest first. [N, n] int64."""
        (head, tail), device = self._kept(used), rows.keys.device
        kept = torch.cat([torch.arange(head, device=device), torch.arange(used - tail, used, device=device)])
        return kept.expand(len(rows.keys), -1)

    def _keep(self, rows: Rows, keys: Tensor, values: Tensor, used: int) -> None:
        """Store the tokens that remain after the block. keys, values: of all cached and new tokens. [N, L, D]."""
        head, tail = self._kept(used)
        parts = [slice(0, head), slice(keys.shape[1] - tail, keys.shape[1])]
        keys, values = (torch.cat([x[:, p] for p in parts], 1) for x in (keys, values))
        rows.put(keys, values, self._positions(used, rows))

    def _keep_from(
        self, rows: Rows, held: Held, keys: Tensor, values: Tensor, used: int, halves: int, factors: Tensor | None
    ) -> None:
        """`_keep` from where the tokens are, without joining them first.

        Args:
            held: before the block; perhaps views of the slots.
            keys: of the block, unrotated. [B, H, T, D].
            values: of the block. [B, H, T, D].
            used: tokens of each stream up to the end of the block.
            halves: how dims of the keys are paired, as in `rope.rotate_into`.
            factors: RoPE of the keys; None if they are kept unrotated. [T, P].
        """
        (head, tail), (streams, _, tokens, _) = self._kept(used), keys.shape
        count, stays = held.keys.shape[1], max(0, tail - tokens)  # stays: the newest of those held that are kept
        old_head = min(head, count)
        old = [torch.cat([x[:, :old_head], x[:, count - stays :]], 1) for x in (held.keys, held.values)]  # may be the slots
        for x, from_held in zip((rows.keys, rows.values), old, strict=True):
            x[:, :old_head], x[:, head : head + stays] = from_held[:, :old_head], from_held[:, old_head:]
        slots = [x.unflatten(0, (streams, -1)) for x in (rows.keys, rows.values)]
        for at, source in (
            (slice(old_head, head), slice(0, head - old_head)),
            (slice(head + stays, head + tail), slice(tokens - (tail - stays), tokens)),
        ):
            rope.rotate_into(slots[0][:, :, at], keys[:, :, source], None if factors is None else factors[source], halves)
            slots[1][:, :, at] = values[:, :, source]
        rows.hold(self._positions(used, rows))
