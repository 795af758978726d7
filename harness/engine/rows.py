"""Rows of cache slots: what a step reads and writes, of one layer or of all layers that share their tensors.

Axis letters: L layers, B streams, H KV heads, R = L * B * H rows, N rows of one layer, G query heads of a KV head, S slots,
D key dim, Dv value dim, n tokens held, k extra axes of a statistic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvbench.policies import Attention, CacheView, Policy

if TYPE_CHECKING:
    from kvbench.harness.engine.slots import Slots


class Held(NamedTuple):
    """What one layer holds, oldest first."""

    keys: Tensor  # [N, n, D]
    values: Tensor  # [N, n, Dv]
    position: Tensor  # [N, n] int64
    states: list[Tensor]  # one a statistic, [N, n]


def effective_importance(policy: Policy, view: CacheView, sliding_window: int | None) -> Tensor:
    """The importance that decides who is evicted: the policy's, and -inf for what no later query may see.

    Args:
        policy: bound.
        view: of the cache, after a step.
        sliding_window: tokens a query of these layers may see, itself included; None if all.

    Returns:
        [R, S] float32.
    """
    importance = policy.importance(view).flatten(0, 1)
    if sliding_window is not None:
        importance = importance.masked_fill(view.age.flatten(0, 1) >= sliding_window - 1, float("-inf"))
    return importance


class Rows:
    """A window on some rows of `Slots`."""

    def __init__(self, slots: Slots, layers: slice, attended: int) -> None:
        """Look at part of the slots.

        Args:
            slots: to look at.
            layers: which of its layers.
            attended: only the first `attended` slots are looked at.
        """
        heads, tensors = slots.shape.heads, slots.tensors
        per_layer = slots.streams * heads
        part = slice(layers.start * per_layer, layers.stop * per_layer)
        self._slots, self._tensors = slots, tensors
        self.keys, self.values = tensors.keys[part, :attended], tensors.values[part, :attended]
        self.rank, self.position = tensors.rank[part, :attended], tensors.position[part, :attended]
        self.free, self._row_base = tensors.free[part], tensors.row_base[part]
        self.base = part.start * slots.num_slots  # flat index of these rows' first slot
        self.states = {s: x[part, :attended].unflatten(0, (-1, heads)) for s, x in tensors.states.items()}
        of_layer = slots.layer_index[layers].repeat_interleave(slots.streams)
        streams = torch.arange(slots.streams, device=self.rank.device)
        self._stream_of_block = streams.repeat(layers.stop - layers.start)  # [L * B]
        self._stream_of_row = self._stream_of_block.repeat_interleave(heads)  # [R]
        rank, position, keys, values = (x.unflatten(0, (-1, heads)) for x in (self.rank, self.position, self.keys, self.values))
        layer = of_layer[:, None, None]  # stands in for the step until the first token
        head = torch.arange(heads, device=self.rank.device)[:, None]
        no_prompt = torch.zeros_like(layer)
        self.view = CacheView(
            rank, position, layer, keys, values, self.states, layer, head, no_prompt, slots.num_layers, slots.seed
        )

    def each_head(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, T] -> T times [R]."""
        return x.T.index_select(1, self._stream_of_row).unbind(0)

    def each_stream(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, T] -> T times [L * B, 1, 1]."""
        return x.T.index_select(1, self._stream_of_block)[..., None, None].unbind(0)

    def place(self, rank: Tensor, step: Tensor, now: Tensor) -> None:
        """Enter the new token in the account of the free slot. rank, step: [R] int64; now: [L * B, 1, 1] int64."""
        self._tensors.flat_rank.index_copy_(0, self.free, rank)
        self._tensors.flat_position.index_copy_(0, self.free, step)
        for statistic, state in self._tensors.flat_states.items():  # an update moves the state of unused slots too
            state.index_fill_(0, self.free, statistic.initial)
        self.view.step = now

    def write(self, key: Tensor, value: Tensor) -> None:
        """Put the new token's K and V into the free slot. [R, D], [R, Dv]."""
        self._tensors.flat_keys.index_copy_(0, self.free, key)
        self._tensors.flat_values.index_copy_(0, self.free, value)

    def used(self) -> Tensor:
        """Slots that hold a token. [R, 1, S] bool."""
        return (self.rank < self._slots.empty_rank)[:, None]

    def update(self, mass: Tensor, valid: Tensor | None) -> None:
        """Update the statistics with the attention of one step. mass: [R, G, S]; valid: [L * B, 1, 1]."""
        for statistic, state in self.states.items():
            attention = Attention(weights=mass.view(*state.shape[:2], -1, state.shape[2]))
            new = statistic.update(state, attention, self.view)
            if valid is not None:
                new = torch.where(valid.view(-1, *[1] * (state.dim() - 1)), new, state)
            state.copy_(new)

    def oldest_first(self, count: int, ordered: bool) -> Held:
        """The `count` tokens that are held, by rank; `ordered`: the slots are in that order already."""
        states = [x.flatten(0, 1) for x in self.states.values()]
        if ordered:
            return Held(self.keys[:, :count], self.values[:, :count], self.position[:, :count], [x[:, :count] for x in states])
        order = self.rank.argsort(-1)[:, :count]
        keys, values = (x.take_along_dim(order[..., None], 1) for x in (self.keys, self.values))
        return Held(keys, values, self.position.take_along_dim(order, 1), [x.take_along_dim(order, 1) for x in states])

    def put(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        """Hold these tokens and no others, oldest first in the first slots. [N, n, D], [N, n, Dv], [N, n] int64."""
        count = position.shape[1]
        self.keys[:, :count], self.values[:, :count] = keys, values
        self.hold(position)

    def hold(self, position: Tensor) -> None:
        """Enter in the account that the first slots hold the tokens at these positions, oldest first. [N, n] int64."""
        count = position.shape[1]
        self.position[:, :count] = position
        self.rank[:, :count] = torch.arange(count, device=position.device)
        self.rank[:, count:] = self._slots.empty_rank
        self.free.copy_(self._row_base + count)

    def put_states(self, state: Tensor, initial: float) -> None:
        """Set the statistic of the tokens that `put` put there, and of all other slots to its initial value. [N, n]."""
        for x in self.states.values():
            flat = x.flatten(0, 1)
            flat[:, : state.shape[1]], flat[:, state.shape[1] :] = state, initial

    def release(self, valid: Tensor | None, full: bool, ragged: bool) -> None:
        """Find the slot for the next token: an unused one, or that of the token worth least.

        Args:
            valid: streams in which the token counted; all when None. [L * B, 1, 1] bool.
            full: no stream has an unused slot.
            ragged: the host does not know which streams have one.
        """
        if self._slots.capacity is not None and (full or ragged):
            self._evict(ragged)
        else:
            self.free += 1 if valid is None else valid.expand(-1, self._slots.shape.heads, 1).flatten()

    def _evict(self, ragged: bool) -> None:
        """Free the slot of the lowest (importance, rank), lexicographically.

        After an invalid token nothing has changed, so this frees again the slot that was free.
        """
        empty, rank = self._slots.empty_rank, self.rank
        importance = effective_importance(self._slots.policy, self.view, self._slots.shape.sliding_window)
        if ragged:  # an unused slot goes before any token
            importance = importance.masked_fill(rank == empty, float("-inf"))
            rank = rank.masked_fill(rank == empty, -1)
        lowest = importance.amin(-1, keepdim=True)
        worst, victim = rank.masked_fill(importance > lowest, empty + 1).min(-1, keepdim=True)
        torch.add(victim[:, 0], self._row_base, out=self.free)
        if ragged:
            worst = worst.masked_fill(worst < 0, empty)
        self.rank.sub_((self.rank > worst).long())
        self._tensors.flat_rank.index_fill_(0, self.free, empty)
