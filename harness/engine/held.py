"""Contents of rows of cache slots: of one layer, or of all layers that share their tensors.

Axis letters: L layers, B streams, H KV heads, R = L * B * H rows, N rows of one layer, S slots, D key dim, Dv value dim,
n tokens held, k extra axes of a statistic.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.rotary import LONGEST_STREAM, Rotation, rotate
from kvbench.harness.engine.slot_stores import StoredView, as_written
from kvbench.harness.engine.slots import Slots
from kvbench.policies import CacheView, Statistic, Written


class Held(NamedTuple):
    """Cached tokens of a layer, oldest first."""

    keys: Tensor  # [N, n, D]
    values: Tensor  # [N, n, Dv]
    position: Tensor  # [N, n] int64
    states: list[Tensor]  # one per statistic of slots, [N, n, *k]; statistics of heads are left out


class HeldRows:
    """Window on some rows of `Slots`: tokens, their ranks and positions, and their statistics."""

    def __init__(self, slots: Slots, attended: int, layer: int | None = None) -> None:
        """Open a window on the first `attended` slots of one layer, or of all layers. layer: index in the model."""
        first = 0 if layer is None else slots.layers.index(layer)
        layers = slice(first, len(slots.layers) if layer is None else first + 1)
        heads, tensors = slots.shape.heads, slots.tensors
        per_layer = slots.streams * heads
        part = slice(layers.start * per_layer, layers.stop * per_layer)
        self._slots, self._tensors = slots, tensors
        account = tensors.position, tensors.rank
        self.windows = self._keys, self._values = [x.window(part, attended, *account) for x in (tensors.keys, tensors.values)]
        self.stored = *self._keys.parts, *self._values.parts  # the tensors of K, then of V, as kernels read them
        self.rank, self.position = tensors.rank[part, :attended], tensors.position[part, :attended]
        self._all_ranks = tensors.rank[part]
        self.free, self.row_base = tensors.free[part], tensors.row_base[part]
        self.heads, self.keys_rotated = heads, slots.keys_rotated
        self.observed_names = slots.sees  # parts of attention that statistics read
        self._pages, self._part = tensors.pages, part
        self.base = part.start * slots.num_slots  # flat index of these rows' first slot
        self._row_states = {s: x[part] for s, x in tensors.states.items()}  # [R, S, *k] or [R, *k]
        self.budgets = None if slots.budget.of_rows is None else slots.budget.of_rows[part]
        shown = {s: x[:, :attended] if s.per == "slot" else x for s, x in self._row_states.items()}
        self.states = {s: x.unflatten(0, (-1, heads)) for s, x in shown.items()}
        self.summed = [s for s in self.states if s.per == "head" and writes(s)]  # statistics that sum over a head's tokens
        self._output = slots.parts[layers.start].output  # valid for a single layer only
        of_layer = slots.layer_index[layers].repeat_interleave(slots.streams)
        streams = torch.arange(slots.streams, device=self.rank.device)
        self.stream_of_block = streams.repeat(layers.stop - layers.start)  # [L * B]
        self.stream_of_row = self.stream_of_block.repeat_interleave(heads)  # [R]
        rank, position = (x.unflatten(0, (-1, heads)) for x in (self.rank, self.position))
        index = of_layer[:, None, None]  # of the layer; also a placeholder for the step until the first token
        head = slots.head_index[layers].repeat_interleave(slots.streams, 0)[..., None]
        prompt = slots.prompt[self.stream_of_block][:, None, None]
        # A bound method would make a reference cycle, which keeps outgrown tensors alive until the garbage collector runs.
        self._rotate = partial(_rotated, slots.shape.rotation)
        rest = self.states, index, head, prompt, slots.num_layers, slots.seed, self._rotate
        self.view: CacheView
        if slots.codec is None and self._pages is None and not slots.keys_rotated:
            keys, values = (x.unflatten(0, (-1, heads)) for x in (self.keys, self.values))
            self.view = CacheView(rank, position, index, keys, values, *rest)
        else:
            keys_window = None if slots.keys_rotated else self._keys
            self.view = StoredView(rank, position, index, keys_window, self._values, *rest)

    @property
    def page_table(self) -> Tensor | None:
        """Pages of each row; None without a pool. [R, W] int64."""
        return None if self._pages is None else self._pages.table[self._part]

    @property
    def page_shape(self) -> tuple[int, int]:
        """Maximum number of pages of a row, and slots per page; zeros without a pool."""
        return (0, 0) if self._pages is None else (self._pages.table.shape[1], self._pages.size)

    @property
    def keys(self) -> Tensor:
        """Stored keys. A coded cache decodes them at every call. [R, S, D], the model's dtype."""
        return self._keys.read()

    @property
    def values(self) -> Tensor:
        """Stored values. A coded cache decodes them at every call. [R, S, Dv], the model's dtype."""
        return self._values.read()

    def of_streams(self, x: Tensor) -> Tensor:
        """Repeat values of streams for each row. [B, T] -> [R, T]."""
        return x.index_select(0, self.stream_of_row)

    def count(self) -> Tensor:
        """Return the number of tokens that each row holds. [R] int64."""
        return (self.rank < self._slots.empty_rank).sum(-1)

    def account(self, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ranks and positions in the order in which keys are stored, and the steps of their rows. step: [R] int64."""
        if self._pages is None:
            return self.rank, self.position, step
        pages = self._pages.of(self._part)
        held = self._pages.slots[pages]
        rank, position = (x[held] for x in (self._tensors.flat_rank, self._tensors.flat_position))
        return rank, position, step[(self._pages.row[pages] - self._part.start).clamp(min=0)]

    def _take_pages(self, last: Tensor) -> None:
        """Allocate the pages of each row up to its slot `last`. No-op without a pool. last: flat indices. [R] int64."""
        if self._pages is not None:
            self._pages.take(self._part, last - self.row_base + 1)

    def _places(self, slots: Tensor) -> Tensor:
        """Map slots to the places of their K and V, which differ in a pool. Flat indices, [n] int64 -> [n] int64."""
        return slots if self._pages is None else self._pages.places(slots)

    def empty_slots(self, count: int) -> Tensor:
        """Return flat indices of the first empty slots of each row. [R, count] int64."""
        occupied = (self.rank < self._slots.empty_rank).to(torch.uint8)
        return occupied.argsort(dim=-1, stable=True)[:, :count] + self.row_base[:, None]

    def leave(self, free: Tensor) -> None:
        """Mark slots as empty. free: flat indices. [R, T] int64."""
        self._tensors.flat_rank.index_fill_(0, free.flatten(), self._slots.empty_rank)

    def oldest_first(self, count: int, ordered: bool) -> Held:
        """Return the `count` tokens held, oldest first. ordered: the slots are already in this order."""
        states = [x.flatten(0, 1) for s, x in self.states.items() if s.per == "slot"]
        if ordered:
            return Held(self.keys[:, :count], self.values[:, :count], self.position[:, :count], [x[:, :count] for x in states])
        order = self.rank.argsort(-1)[:, :count]
        keys, values = (x.take_along_dim(order[..., None], 1) for x in (self.keys, self.values))
        states = [x.take_along_dim(_like(order, x), 1) for x in states]
        return Held(keys, values, self.position.take_along_dim(order, 1), states)

    def put(self, keys: Tensor, values: Tensor, position: Tensor, counts: Tensor | None = None) -> None:
        """Replace the cached tokens of each row by these tokens, oldest first.

        Args:
            keys: [N, n, D].
            values: [N, n, Dv].
            position: [N, n] int64.
            counts: number of tokens of each row; n when None. [N] int64.
        """
        self.hold(position)
        if counts is not None:
            self.shorten(counts)
            if self._pages is not None:
                self._pages.give_back(self._part, counts)
        self._take_pages(self.free - 1)
        self._keys.put(keys)
        self._values.put(values)

    def hold(self, position: Tensor) -> None:
        """Set ranks and positions as if the first slots hold the tokens at these positions, oldest first. [N, n] int64."""
        count = position.shape[1]
        self.position[:, :count] = position
        self.rank[:, :count] = torch.arange(count, device=position.device)
        self.rank[:, count:] = self._slots.empty_rank
        self.free.copy_(self.row_base + count)

    def shorten(self, counts: Tensor) -> None:
        """Keep only the first `counts` tokens of each row. Call it after `hold`. counts: [N] int64."""
        self.rank.masked_fill_(self.rank >= counts[:, None], self._slots.empty_rank)
        self.free.copy_(self.row_base + counts)

    def written(self, key: Tensor, value: Tensor, step: Tensor, ids: Tensor) -> dict[Statistic, Tensor]:
        """Compute the first values of statistics for written tokens, in the rows of one layer. [N, T, *k] each.

        Args:
            key: unrotated, paired. [N, T, D].
            value: [N, T, Dv].
            step: [N, T] int64.
            ids: ids of the tokens. [N, T] int64.
        """
        if not any(writes(s) for s in self.states):
            return {}
        heads = self._slots.shape.heads
        keys, values, steps, tokens = (x.unflatten(0, (-1, heads)) for x in (key, value, step, ids))
        token = Written(keys, values, steps, tokens, self._rotate, self._output)
        values_of = {s: s.written(token) for s in self.states}
        return {s: x.flatten(0, 1) for s, x in values_of.items() if x is not None}

    def note_written(
        self, free: Tensor, key: Tensor, value: Tensor, step: Tensor, ids: Tensor, valid: Tensor | None = None
    ) -> None:
        """Set the first values of statistics for written tokens, in the rows of one layer.

        Args:
            free: flat indices of the tokens' slots. [N, T] int64.
            key: unrotated, paired. [N, T, D].
            value: [N, T, Dv].
            step: [N, T] int64.
            ids: ids of the tokens. [N, T] int64.
            valid: tokens that count; all when None. [N, T] bool.
        """
        if (codec := self._slots.codec) is not None:
            key, value = as_written(key, step, codec), as_written(value, step, codec)
        self.set_written(free, self.written(key, value, step, ids), valid)

    def set_written(self, free: Tensor, first_values: Mapping[Statistic, Tensor], valid: Tensor | None = None) -> None:
        """Set the first values that `written` computed. free, valid: as in `note_written`; first_values: [N, T, *k] each."""
        for statistic, first in first_values.items():
            if statistic.per == "slot":
                state = self._tensors.flat_states[statistic]
                state.index_copy_(0, free.flatten(), first.flatten(0, 1).to(state.dtype))
            else:
                added = first.double() if valid is None else first.double() * _like(valid, first)
                self._row_states[statistic] += added.sum(1)

    def forget(self, victims: Tensor) -> None:
        """Subtract evicted tokens from sums over a head's tokens, before their slots are reused. victims: [R, S] bool."""
        for statistic, lost in self._sums(victims).items():
            self._row_states[statistic] -= lost

    def forget_one(self, victim: Tensor, evicted: Tensor) -> None:
        """Subtract one evicted token per row from sums over a head's tokens, before its slot is reused.

        Args:
            victim: slot of the token. [R, 1] int64.
            evicted: rows that evict a token. [R, 1] bool.
        """
        for statistic, lost in self._sums(evicted, victim).items():
            self._row_states[statistic] -= lost

    def count_again(self) -> None:
        """Compute sums over a head's tokens again from the stored K and V, which a codec has changed. No-op without a codec."""
        sums = self._sums(self.rank < self._slots.empty_rank) if self._slots.codec else {}
        for statistic, held in sums.items():
            self._row_states[statistic].copy_(held)

    def _sums(self, tokens: Tensor, slots: Tensor | None = None) -> dict[Statistic, Tensor]:
        """Return sums over some of each head's tokens, from the stored K and V.

        Args:
            tokens: tokens that are summed. [R, n] bool.
            slots: slots of the n tokens; all when None. [R, n] int64.

        Returns:
            [R, *k] float64 each.
        """
        if not self.summed:
            return {}
        view, heads = self.view, self._slots.shape.heads
        keys, values, position = view.keys, view.values, view.position.clamp(min=0)
        if slots is not None:
            index = slots.unflatten(0, (-1, heads))
            keys, values, position = (x.take_along_dim(_like(index, x), 2) for x in (keys, values, position))
        token = Written(keys, values, position, torch.zeros_like(position), self._rotate, self._output)
        parts = {s: x for s in self.summed if (x := s.written(token)) is not None}
        mask = tokens.unflatten(0, (-1, heads))
        return {s: (x.double() * _like(mask, x)).sum(2).flatten(0, 1) for s, x in parts.items()}


def _rotated(rotation: Rotation | None, x: Tensor, position: Tensor) -> Tensor:
    """`CacheView.rotate` of a layer."""
    if rotation is None:
        return x
    return rotate(x.contiguous(), rotation.factors(position.expand(x.shape[:-1]), x.dtype, LONGEST_STREAM))


def writes(statistic: Statistic) -> bool:
    """Return whether a statistic computes a value when a token is written."""
    return type(statistic).written is not Statistic.written


def _like(x: Tensor, other: Tensor) -> Tensor:
    """Append axes of size 1 to `x`, until it has as many axes as `other`."""
    return x.view(*x.shape, *[1] * (other.dim() - x.dim()))
