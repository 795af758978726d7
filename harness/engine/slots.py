"""Cache slots: preallocated, written in place, and the account of who holds them.

Evicting is one indexed write. The order of slots means nothing; ranks say who is older. A slot is empty
when its rank is the number of slots. Layers of one shape share their tensors, so that what is done per
step and not per layer is done once. Axis letters: L layers, B streams, H KV heads, R = L * B * H rows,
G query heads of a KV head, S slots, D head dim, k extra axes of a statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.rotary import Rotation
from kvbench.policies import CacheView, Policy, Statistic

BUCKET = 256  # slots; a cache that is not full attends over the next multiple of it


@dataclass(frozen=True)
class LayerShape:
    """What a layer's cache needs to know of its model. Layers that compare equal share their tensors."""

    heads: int  # KV heads
    group: int  # query heads of a KV head
    key_dim: int
    value_dim: int
    rotation: Rotation | None  # None: no RoPE in this layer
    sliding_window: int | None  # tokens a query may see, itself included
    plain: bool = True  # scores go to the softmax as they are, and nothing else takes mass

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's K and V in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * dtype.itemsize

    def kept(self, capacity: int | None) -> int | None:
        """Tokens this layer keeps between steps: a sliding-window layer no more than its window; None if all."""
        if self.sliding_window is None:
            return capacity
        return self.sliding_window - 1 if capacity is None else min(capacity, self.sliding_window - 1)


class Held(NamedTuple):
    """What one layer holds, oldest first."""

    keys: Tensor  # [N, n, D]
    values: Tensor  # [N, n, Dv]
    position: Tensor  # [N, n] int64
    states: list[Tensor]  # one a statistic, [N, n]


class Rows:
    """A window on the slots of one layer, or of all that share tensors: what a step reads and writes."""

    def __init__(self, slots: Slots, layers: slice, attended: int) -> None:
        """Look at part of the slots.

        Args:
            slots: to look at.
            layers: which of its layers.
            attended: only the first so many slots are looked at.
        """
        per_layer = slots.streams * slots.shape.heads
        part = slice(layers.start * per_layer, layers.stop * per_layer)
        self._slots = slots
        self.keys, self.values = slots.keys[part, :attended], slots.values[part, :attended]
        self.rank, self.position = slots.rank[part, :attended], slots.position[part, :attended]
        self.free, self._first = slots.free[part], slots.first[part]
        self.first = part.start * slots.empty  # number of the first slot, in the count that `free` uses
        heads = slots.shape.heads
        self.states = {s: x[part, :attended].unflatten(0, (-1, heads)) for s, x in slots.states.items()}
        of_layer = slots.layer_index[layers].repeat_interleave(slots.streams)
        streams = torch.arange(slots.streams, device=self.rank.device)
        self._stream_of_block = streams.repeat(layers.stop - layers.start)  # [L * B]
        self._stream_of_row = self._stream_of_block.repeat_interleave(heads)  # [R]
        rank, position, keys, values = (x.unflatten(0, (-1, heads)) for x in (self.rank, self.position, self.keys, self.values))
        layer = of_layer[:, None, None]  # stands in for the step until the first token
        self.view = CacheView(rank, position, layer, keys, values, self.states, layer, slots.num_layers, slots.seed)

    def each_head(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, T] -> T times [R]."""
        return x.T.index_select(1, self._stream_of_row).unbind(0)

    def each_stream(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, T] -> T times [L * B, 1, 1]."""
        return x.T.index_select(1, self._stream_of_block)[..., None, None].unbind(0)

    def hold(self, rank: Tensor, step: Tensor, now: Tensor) -> None:
        """Note the new token in the free slot. rank, step: [R] int64; now: [L * B, 1, 1] int64."""
        self._slots.flat_rank.index_copy_(0, self.free, rank)
        self._slots.flat_position.index_copy_(0, self.free, step)
        for statistic, state in self._slots.flat_states.items():  # an unused slot's may have moved too
            state.index_fill_(0, self.free, statistic.initial)
        self.view.step = now

    def write(self, key: Tensor, value: Tensor) -> None:
        """Put the new token's K and V into the free slot. [R, D], [R, Dv]."""
        self._slots.flat_keys.index_copy_(0, self.free, key)
        self._slots.flat_values.index_copy_(0, self.free, value)

    def used(self) -> Tensor:
        """Slots that hold a token. [R, 1, S] bool."""
        return (self.rank < self._slots.empty)[:, None]

    def update(self, mass: Tensor, valid: Tensor | None) -> None:
        """Statistics take in the attention of one step. mass: [R, G, S]; valid: [L * B, 1, 1]."""
        for statistic, state in self.states.items():
            new = statistic.update(state, mass.view(*state.shape[:2], -1, state.shape[2]), self.view)
            if valid is not None:
                new = torch.where(valid.view(-1, *[1] * (state.dim() - 1)), new, state)
            state.copy_(new)

    def oldest_first(self, count: int, ordered: bool) -> Held:
        """The `count` tokens that are held, by rank; `ordered`: they lie so already."""
        states = [x.flatten(0, 1) for x in self.states.values()]
        if ordered:
            return Held(self.keys[:, :count], self.values[:, :count], self.position[:, :count], [x[:, :count] for x in states])
        order = self.rank.argsort(-1)[:, :count]
        keys, values = (x.take_along_dim(order[..., None], 1) for x in (self.keys, self.values))
        return Held(keys, values, self.position.take_along_dim(order, 1), [x.take_along_dim(order, 1) for x in states])

    def put(self, keys: Tensor, values: Tensor, position: Tensor) -> None:
        """Hold these tokens and no others, oldest first in the first slots. [N, n, D], [N, n, Dv], [N, n] int64."""
        count = position.shape[1]
        self.keys[:, :count], self.values[:, :count], self.position[:, :count] = keys, values, position
        self.rank[:, :count], self.rank[:, count:] = torch.arange(count, device=position.device), self._slots.empty
        self.free.copy_(self._first + count)

    def release(self, valid: Tensor | None, full: bool, ragged: bool) -> None:
        """Find the slot for the next token: an unused one, or that of the token worth least.

        Args:
            valid: streams in which the token counted; all when None. [L * B, 1, 1] bool.
            full: no stream has an unused slot.
            ragged: the host does not know which streams have.
        """
        if self._slots.capacity is not None and (full or ragged):
            self._evict(ragged)
        else:
            self.free += 1 if valid is None else valid.expand(-1, self._slots.shape.heads, 1).flatten()

    def _evict(self, ragged: bool) -> None:
        """Free the slot of the lowest (importance, rank).

        After an invalid token nothing has changed, so this frees again the slot that was free.
        """
        empty, window = self._slots.empty, self._slots.shape.sliding_window
        importance, rank = self._slots.policy.importance(self.view).flatten(0, 1), self.rank
        if window is not None:  # what no later query may see goes first
            importance = importance.masked_fill(self.view.age.flatten(0, 1) >= window - 1, float("-inf"))
        if ragged:  # or an unused slot, where there is one
            importance = importance.masked_fill(rank == empty, float("-inf"))
            rank = rank.masked_fill(rank == empty, -1)
        lowest = importance.amin(-1, keepdim=True)
        worst, victim = rank.masked_fill(importance > lowest, empty + 1).min(-1, keepdim=True)  # the first of equals
        torch.add(victim[:, 0], self._first, out=self.free)
        if ragged:
            worst = worst.masked_fill(worst < 0, empty)
        self.rank.sub_((self.rank > worst).long())
        self._slots.flat_rank.index_fill_(0, self.free, empty)


class Slots:
    """The slots of layers of one shape, and what their policy keeps about them."""

    def __init__(
        self,
        shape: LayerShape,
        layers: Sequence[int],
        num_layers: int,
        policy: Policy,
        capacity: int | None,
        streams: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        room: int | None = None,
    ) -> None:
        """Allocate.

        Args:
            shape: of each layer.
            layers: their indices in the model.
            num_layers: of the whole model.
            policy: unbound; it is bound here.
            capacity: tokens kept between steps, None if all; a sliding-window layer keeps no more than its window in
                any case.
            streams: B.
            seed: of the policy's randomness.
            device: of the slots.
            dtype: of K and V.
            room: tokens held before anything is evicted, where that is not the capacity: all of a prompt.
        """
        capacity = shape.kept(capacity)
        self.policy = policy if capacity is None else policy.bind(capacity)
        capacity = capacity if room is None else shape.kept(room)
        self.shape, self.layers, self.num_layers = shape, list(layers), num_layers
        self.layer_index = torch.tensor(self.layers, device=device)
        self.capacity, self.streams, self.seed = capacity, streams, seed
        self.version = 0  # how often the tensors were made anew
        rows, slots = len(layers) * streams * shape.heads, BUCKET if capacity is None else capacity + 1
        self.keys = torch.zeros(rows, slots, shape.key_dim, device=device, dtype=dtype)
        self.values = torch.zeros(rows, slots, shape.value_dim, device=device, dtype=dtype)
        self.rank = torch.full((rows, slots), slots, device=device)
        self.position = torch.full((rows, slots), -1, device=device)
        self.wide = torch.promote_types(dtype, torch.float32)  # of statistics and softmax weights
        self.states: dict[type[Statistic], Tensor] = {
            s: torch.full((rows, slots, *s.shape), s.initial, device=device, dtype=self.wide) for s in policy.statistics
        }
        self._index(torch.zeros(rows, dtype=torch.int64, device=device))

    def _index(self, offset: Tensor) -> None:
        """Flat views that steps write through, made again whenever the tensors are. offset: the free slots. [R]."""
        rows, self.empty = self.rank.shape
        self.first = torch.arange(rows, device=self.rank.device) * self.empty
        self.free = self.first + offset  # where the next token goes
        self.flat_keys, self.flat_values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        self.flat_rank, self.flat_position = self.rank.flatten(), self.position.flatten()
        self.flat_states = {s: x.flatten(0, 1) for s, x in self.states.items()}
        self.windows: dict[tuple[int, int | None], Rows] = {}  # made so far
        self.version += 1

    def rows(self, attended: int, layer: int | None = None) -> Rows:
        """The window of one layer (its index in the model), or of all."""
        if (attended, layer) not in self.windows:
            at = 0 if layer is None else self.layers.index(layer)
            layers = slice(at, len(self.layers) if layer is None else at + 1)
            self.windows = {key: rows for key, rows in self.windows.items() if key[0] == attended}
            self.windows[attended, layer] = Rows(self, layers, attended)
        return self.windows[attended, layer]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V slots."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of everything else kept between steps: ranks, positions, statistics, free slots."""
        return sum(x.nbytes for x in (self.rank, self.position, self.free, *self.states.values()))

    def attended(self, used: int | None) -> int:
        """Slots a step looks at when `used` may hold a token: whole buckets; all when None."""
        return self.empty if used is None else min(self.empty, -(-used // BUCKET) * BUCKET)

    def looked_at(self, seen: int) -> tuple[int, int]:
        """Slots that hold a token after so many, and slots the step that read the last of them attended over."""
        used = seen if self.capacity is None else min(seen, self.capacity + 1)
        return used, self.attended(used)

    def held(self, positions: Tensor) -> Tensor:
        """Which tokens of the first stream are held. positions: [K] int64 -> [L, H, K] bool."""
        first = self.position.view(len(self.layers), self.streams, self.shape.heads, -1)[:, 0]
        holding = self.rank.view(len(self.layers), self.streams, self.shape.heads, -1)[:, 0] < self.empty
        return torch.stack([((first == p) & holding).any(-1) for p in positions], -1)

    def grow(self, used: int) -> None:
        """Make room for `used` tokens, in whole buckets. A bounded cache has its room from the start."""
        if self.capacity is not None or used <= self.empty:
            return
        larger = -(-used // BUCKET) * BUCKET
        self.rank.masked_fill_(self.rank == self.empty, larger)

        def extended(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((x.shape[0], larger - x.shape[1], *x.shape[2:]), fill)], 1)

        offset = self.free - self.first
        self.keys, self.values = extended(self.keys, 0), extended(self.values, 0)
        self.rank, self.position = extended(self.rank, larger), extended(self.position, -1)
        self.states = {s: extended(x, s.initial) for s, x in self.states.items()}
        self._index(offset)

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Positions held, oldest first, per stream and KV head. Syncs with the host."""
        rows = self.rows(self.empty, layer)
        held = [
            [p for r, p in sorted(zip(ranks, positions, strict=True)) if r < self.empty]
            for ranks, positions in zip(rows.rank.tolist(), rows.position.tolist(), strict=True)
        ]
        heads = self.shape.heads
        return [held[b * heads : (b + 1) * heads] for b in range(self.streams)]

    def fork(self, streams: Tensor) -> Slots:
        """Slots whose streams are copies of these. streams: [B'] int64."""
        other = copy(self)
        other.streams = len(streams)

        def chosen(x: Tensor) -> Tensor:
            by_stream = x.view(len(self.layers), self.streams, self.shape.heads, *x.shape[1:])
            return by_stream[:, streams].flatten(0, 2)

        other.keys, other.values = chosen(self.keys), chosen(self.values)
        other.rank, other.position = chosen(self.rank), chosen(self.position)
        other.states = {s: chosen(x) for s, x in self.states.items()}
        other._index(chosen(self.free - self.first))
        return other
