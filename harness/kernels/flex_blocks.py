"""Closed form of blocks on CUDA, by FlexAttention and by the kernels of `rope.py`.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens of the block, L keys, E sinks, D head dim,
P = D / 2 pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.banded import Sinks, merged, outside_windows
from kvbench.harness.engine.closed_form import TILE, ClosedForm
from kvbench.harness.engine.held import Held
from kvbench.harness.engine.method import RAN
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.kernels import rope
from kvbench.harness.kernels.flex import can_be_flex, flex, whole_tiles
from kvbench.policies import PositionMode


class Rope(NamedTuple):
    """RoPE that a kernel still has to apply to a query.

    Attributes:
        factors: None without RoPE. [T, P] complex64.
        halves: pairing of dims, as in `rope.rotate_into`.
    """

    factors: Tensor | None
    halves: int


def banded_by_flex(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int,
    sinks: Sinks | None,
    terms: Terms,
    first: int,
    padding: int = 0,
    sinks_rope: Rope | None = None,
) -> Tensor:
    """Compute `banded` with the window's attention by FlexAttention, which must support it (`can_be_flex`).

    Args:
        query, keys, values, window, sinks, terms, first: arguments of `banded`.
        padding: number of keys at the end that belong to no token.
        sinks_rope: RoPE of `sinks.query`, if the query is as the model computes it; None if it is rotated.

    Returns:
        [B, H, G, T, D], dtype of the query.
    """
    tokens = query.shape[3]
    near, log_sum = flex(query, keys, values, padding, window, terms)
    if sinks is None:
        return near
    start = first + keys.shape[2] - padding - tokens - window  # position at which the first query's window starts
    if sinks_rope is not None:
        return rope.merge(near, log_sum, sinks.query, *sinks_rope, sinks.keys, sinks.values, start, terms.scaling)
    return merged(near, log_sum, sinks, outside_windows(sinks, tokens, start), terms)


class FlexForm(ClosedForm):
    """Closed form that computes blocks of whole tiles by FlexAttention."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, rope_length: int, band: tuple[int, int]) -> None:
        """Prepare for layers that keep a band. Arguments are those of `ClosedForm`."""
        super().__init__(slots, mode, limit, rope_length, band)
        shape = slots.shape
        query = torch.empty(1, 1, 1, TILE, shape.key_dim, dtype=slots.dtype, device=slots.device)
        self.may_flex = shape.plain_softmax and can_be_flex(query, query.new_empty(1, shape.value_dim), Terms(1.0))

    def __call__(
        self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, held: Held, tokens_before: int
    ) -> Tensor:
        """Read a block into one layer. Arguments and result are those of `ClosedForm`."""
        if not can_be_flex(query, values, terms):
            return super().__call__(rows, query, keys, values, terms, held, tokens_before)
        terms = terms._replace(sliding_window=None)
        RAN["FlexAttention"] += 1
        if rope.serves(query):
            return self._by_kernel(rows, query, keys, values, terms, held, tokens_before)
        return self._read(rows, query, keys, values, terms, held, tokens_before, banded_by_flex)

    def _by_kernel(
        self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, held: Held, tokens_before: int
    ) -> Tensor:
        """`__call__` by kernels, which write FlexAttention's inputs and the kept tokens once, without copies in between."""
        (query, halves), (keys, _) = rope.pairing(self._rotation, query), rope.pairing(self._rotation, keys)
        (streams, heads, tokens, dim), (skipped, first) = keys.shape, self._near(tokens_before)
        old_keys, old_values = held.keys.unflatten(0, (streams, -1)), held.values.unflatten(0, (streams, -1))
        before = old_keys.shape[2] - skipped
        length = before + tokens
        old, new = self._near_factors(before, tokens, tokens_before, keys)
        near_query = query.new_empty(query.shape)
        near_keys, near_values = (keys.new_empty(streams, heads, whole_tiles(length), dim) for _ in range(2))
        rope.rotate_into(near_query.flatten(1, 2), query.flatten(1, 2), new, halves)
        rope.rotate_into(near_keys[:, :, :before], old_keys[:, :, skipped:], old)
        rope.rotate_into(near_keys[:, :, before:length], keys, new, halves)
        near_values[:, :, :before], near_values[:, :, before:length] = old_values[:, :, skipped:], values
        near_keys[:, :, length:], near_values[:, :, length:] = 0, 0
        sinks, sinks_rope = None, None
        if self._sees_sinks(tokens_before + tokens):
            sinks, sinks_rope = self._unrotated_sinks(query, keys, values, old_keys, old_values, tokens_before, halves)
        padding = near_keys.shape[2] - length
        out = banded_by_flex(near_query, near_keys, near_values, self._window, sinks, terms, first, padding, sinks_rope)
        self._keep_from(rows, held, keys, values, tokens_before + tokens, halves, new if self._keys_rotated else None)
        return out

    def _near_factors(self, before: int, tokens: int, tokens_before: int, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return RoPE of `before` keys held and of the block, at consecutive positions; None if they need none. [n, P] each."""
        if self._rotation is None:
            return None, None
        if self._keys_rotated:
            positions = torch.arange(tokens_before, tokens_before + tokens, device=like.device)
            return None, self._rotation.factors(positions, like.dtype, self._rope_length)
        factors = self._rotation.factors(torch.arange(before + tokens, device=like.device), like.dtype, before + tokens)
        return factors[:before], factors[before:]

    def _unrotated_sinks(
        self, query: Tensor, keys: Tensor, values: Tensor, old_keys: Tensor, old_values: Tensor, tokens_before: int, halves: int
    ) -> tuple[Sinks, Rope]:
        """Return rotated sinks with unrotated queries, and RoPE of the queries.

        keys, values: K and V of the block; old_keys, old_values: K and V held before the block.
        """
        count, tokens = self._sinks, keys.shape[2]
        missing = max(0, count - old_keys.shape[2])
        first_keys = keys.new_empty(*keys.shape[:2], count, keys.shape[3])
        query_factors, old, new = None, None, None
        if self._rotation is not None:
            query_factors, factors = self._far_factors(count, tokens, tokens_before, self._rotation, keys)
            old, new = None if self._keys_rotated else factors[: count - missing], factors[count - missing :]
        rope.rotate_into(first_keys[:, :, : count - missing], old_keys[:, :, :count], old)
        rope.rotate_into(first_keys[:, :, count - missing :], keys[:, :, :missing], new, halves)
        first_values = torch.cat([old_values[:, :, :count], values[:, :, :missing]], 2)
        return Sinks(query, first_keys, first_values), Rope(query_factors, halves)

    def _keep_from(
        self, rows: Rows, held: Held, keys: Tensor, values: Tensor, used: int, halves: int, factors: Tensor | None
    ) -> None:
        """`_keep` without joining cached and new tokens first.

        Args:
            held: tokens held before the block, perhaps as views of the slots.
            keys: unrotated keys of the block. [B, H, T, D].
            values: values of the block. [B, H, T, D].
            used: tokens of each stream up to the end of the block.
            halves: pairing of the keys' dims, as in `rope.rotate_into`.
            factors: RoPE of the keys; None if keys are stored unrotated. [T, P].
        """
        (head, tail), (streams, _, tokens, _) = self._kept(used), keys.shape
        count, stays = held.keys.shape[1], max(0, tail - tokens)  # stays: number of newest held tokens that are kept
        old_head = min(head, count)
        old = [torch.cat([x[:, :old_head], x[:, count - stays :]], 1) for x in (held.keys, held.values)]  # copies of views
        for x, from_held in zip((rows.keys, rows.values), old, strict=True):
            x[:, :old_head], x[:, head : head + stays] = from_held[:, :old_head], from_held[:, old_head:]
        slots = [x.unflatten(0, (streams, -1)) for x in (rows.keys, rows.values)]
        for target, source in (
            (slice(old_head, head), slice(0, head - old_head)),
            (slice(head + stays, head + tail), slice(tokens - (tail - stays), tokens)),
        ):
            rope.rotate_into(slots[0][:, :, target], keys[:, :, source], None if factors is None else factors[source], halves)
            slots[1][:, :, target] = values[:, :, source]
        rows.hold(self._positions(used, rows))
