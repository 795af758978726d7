"""Cache slots: preallocated and written in place.

Evicting is one indexed write. The order of slots means nothing; ranks say who is older. A slot is empty when its rank is the
number of slots. Layers of one shape share their tensors, so that one operation can serve them all.

Axis letters: L layers, B streams, H KV heads, R = L * B * H rows, S slots, D key dim, Dv value dim, k extra axes of a statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.harness.core.codec import Codec
from kvbench.harness.core.evict import Pages
from kvbench.harness.engine.pool import MAY_ASK, PAGE, PageTable, pages_for
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.slot_tensors import SlotTensors, empty_stores
from kvbench.policies import HeadSizes, Policy, Statistic

BUCKET = 256  # slots; a cache that is not full attends over the next multiple of it


@dataclass(frozen=True)
class LayerShape:
    """Properties of a layer that its cache depends on. Layers that compare equal share their tensors.

    Attributes:
        group: query heads of a KV head.
        rotation: None if the layer has no RoPE.
        sliding_window: tokens a query may see, itself included; None if all.
        plain_softmax: scores go to the softmax unchanged, and nothing but keys takes mass.
        device: where its K and V are computed and kept, in a model that spans several devices; the model's when None.
    """

    heads: int
    group: int
    key_dim: int
    value_dim: int
    rotation: Rotation | None
    sliding_window: int | None
    plain_softmax: bool = True
    device: torch.device | None = None

    @property
    def sizes(self) -> HeadSizes:
        """Sizes of one KV head, as policies see them."""
        return HeadSizes(self.group, self.key_dim, self.value_dim)

    def kv_bytes(self, slots: int, dtype: torch.dtype, codec: Codec | None = None) -> int:
        """Bytes of slots for K and V in this layer."""
        if codec is None:
            return slots * self.heads * (self.key_dim + self.value_dim) * dtype.itemsize
        return self.heads * codec.allocated(slots, self.key_dim, self.value_dim, dtype.itemsize)

    def kept(self, capacity: int | None) -> int | None:
        """Tokens this layer keeps between steps: a sliding-window layer no more than its window; None if all."""
        if self.sliding_window is None:
            return capacity
        return self.sliding_window - 1 if capacity is None else min(capacity, self.sliding_window - 1)


@dataclass(frozen=True)
class Budget:
    """Number of tokens that the heads of some layers may hold.

    Attributes:
        capacity: tokens per head held after an eviction, on average; None if all are.
        floor: the least a head holds, if all heads of a layer compete; None if each head has a budget of its own.
        of_rows: what each row held first, if rows differ: its budget, if each has its own. [R, 1] int64.
        pages: whole ones go; None if tokens do.
        slots: of each row; None for as many as the capacity needs.
        bucket: slots that a cache without a capacity grows by.
    """

    capacity: int | None
    floor: int | None = None
    of_rows: Tensor | None = None
    pages: Pages | None = None
    slots: int | None = None
    bucket: int = BUCKET

    @classmethod
    def growing_from(cls, held: int) -> Budget:
        """Budget of a cache that grows after its prompt was cut to `held` tokens, by about an eighth at a time."""
        bucket = min(BUCKET, max(16, 1 << max(0, (held // 8).bit_length() - 1)))
        return cls(None, slots=-(-(held + 1) // bucket) * bucket, bucket=bucket)


@dataclass(frozen=True)
class LayerHeads:
    """Heads of one layer that live in the same `Slots`.

    Attributes:
        heads: their indices in the layer; all when None.
        output: of the layer, as `Written.output` has it. [H, G, E, Dv].
    """

    layer: int
    heads: tuple[int, ...] | None = None
    output: Tensor | None = None


@dataclass(frozen=True)
class Cadence:
    """How many tokens a KV head holds as its stream goes on, which the host knows without looking at the cache.

    Attributes:
        capacity: tokens held after an eviction; None if nothing is evicted any more.
        every: tokens evicted at once. They go as soon as `capacity + every` are held.
        origin: tokens read when `capacity` were first held: the capacity itself, or the length of a prompt that was cut to it.
        dropped: tokens read that were not held when eviction ended; 0 unless a prompt was cut.
    """

    capacity: int | None
    every: int = 1
    origin: int = 0
    dropped: int = 0

    @classmethod
    def from_start(cls, capacity: int | None, every: int = 1) -> Cadence:
        """Create the cadence of a stream whose cache fills token by token."""
        return cls(capacity, every, capacity or 0)

    def after(self, prompt: int, held: int) -> Cadence:
        """Return this cadence restarted after a prompt was cut to at most `held` tokens per head."""
        if self.capacity is None:
            return Cadence(None, self.every, 0, prompt - held)
        return Cadence(self.capacity, self.every, max(prompt, self.capacity))

    def held(self, tokens_read: int) -> int:
        """Tokens held after `tokens_read` tokens were read."""
        if self.capacity is None:
            return tokens_read - self.dropped
        return tokens_read if tokens_read < self.origin else self.capacity + (tokens_read - self.origin) % self.every

    def held_of(self, tokens_read: Tensor) -> Tensor:
        """Return `held` for numbers of tokens that only the device knows. Any shape, int64."""
        if self.capacity is None:
            return tokens_read - self.dropped
        return tokens_read.where(tokens_read < self.origin, self.capacity + (tokens_read - self.origin) % self.every)

    def evicts(self, tokens_read: int) -> bool:
        """Whether tokens are evicted after the last of `tokens_read` tokens."""
        return self.capacity is not None and tokens_read > self.origin and (tokens_read - self.origin) % self.every == 0

    def runs(self, tokens_read: int, tokens: int) -> list[int]:
        """The lengths of the runs that a block is cut into, so that evictions fall only at their ends."""
        if self.capacity is None:
            return [tokens]
        end, lengths = tokens_read + tokens, list[int]()
        while tokens_read < end:
            due = self.origin + self.every * (max(0, tokens_read - self.origin) // self.every + 1)
            lengths.append(min(due, end) - tokens_read)
            tokens_read += lengths[-1]
        return lengths


class Slots:
    """The slots of layers, or parts of layers, of one shape, and what their policy keeps about them.

    Attributes:
        shape: of each layer; its heads are those that live here.
        parts: which heads of which layers.
        layers: their indices in the model.
        capacity: tokens held between steps, on average over heads; None if all.
        every: tokens that are evicted at once.
        rows: of a layer: its heads in all streams.
        most: the largest number of tokens held during a step; None if there is none.
        uneven: heads hold different numbers of tokens, so that only the device knows how many.
        evicts_each_step: every row evicts one token after each step, once it is full.
        sees: what statistics read of attention.
        dtype: of K and V, as they are read.
        codec: of K and V, as they are stored; None: in that dtype.
        empty_rank: the rank that marks an empty slot: one that no token has.
        keys_rotated: keys are kept rotated to their positions in the stream.
        state_dtype: dtype of statistics and softmax weights.
        layer_index: the indices of the layers. [L] int64.
        head_index: the heads' indices in their layers. [L, H] int64.
        prompt: tokens of each stream's prompt, 0 if it has none. [B] int64.
        quiet: statistics that see attention don't look at the first `quiet` tokens.
        version: number of times the tensors, or the prompt, were replaced: `Rows` made before are out of date.
    """

    def __init__(
        self,
        shape: LayerShape,
        *,
        parts: Sequence[LayerHeads],
        policy: Policy,
        statistics: Sequence[Statistic],
        cadence: Cadence,
        budget: Budget,
        num_layers: int,
        streams: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        keys_rotated: bool = False,
        codec: Codec | None = None,
    ) -> None:
        """Allocate.

        Raises:
            ValueError: the codec can't store heads of this size.
        """
        self.policy, self.cadence, self.budget, self.parts = policy, cadence, budget, list(parts)
        self.capacity, self.every = cadence.capacity, cadence.every
        self.most = None if self.capacity is None else self.capacity + self.every
        self.uneven = budget.floor is not None or budget.of_rows is not None
        self.evicts_each_step = self.capacity is not None and self.every == 1 and not self.uneven and budget.pages is None
        self.sees = frozenset(name for s in statistics for name in s.sees)
        self.shape, self.layers, self.num_layers = shape, [part.layer for part in parts], num_layers
        self.streams, self.seed, self.quiet, self.keys_rotated = streams, seed, 0, keys_rotated
        self.rows = streams * shape.heads
        self._surplus = self._surplus_of(budget.of_rows)  # tokens that a layer's rows hold more than the cadence says
        self.layer_index = torch.tensor(self.layers, device=device)
        self.head_index = torch.tensor([list(part.heads or range(shape.heads)) for part in parts], device=device)
        self.prompt = torch.zeros(streams, dtype=torch.int64, device=device)
        self.state_dtype = torch.promote_types(dtype, torch.float32)
        rows, slots = len(parts) * self.rows, budget.slots or self.most or BUCKET
        zeros = torch.zeros(1, 1, 1, device=device, dtype=dtype)
        keys, values = zeros.expand(rows, slots, shape.key_dim), zeros.expand(rows, slots, shape.value_dim)
        pages = None
        if self.uneven and codec is None:
            pages = PageTable.empty(rows, slots, len(parts), self._num_pages(0), PAGE, device)
        self.tensors = SlotTensors(
            *empty_stores(codec, keys, values, pages),
            rank=torch.full((rows, slots), slots, device=device),
            position=torch.full((rows, slots), -1, device=device),
            states={s: self._first_state(s, rows, slots, device) for s in statistics},
            offset=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.device, self.num_slots, self.empty_rank = self.tensors.rank.device, slots, slots
        self.dtype, self.codec, self.version = dtype, codec, 0

    def _first_state(self, statistic: Statistic, rows: int, slots: int, device: torch.device) -> Tensor:
        """A statistic of empty slots."""
        size, dtype = ((rows, slots), self.state_dtype) if statistic.per == "slot" else ((rows,), torch.float64)
        return torch.full((*size, *statistic.shape(self.shape.sizes)), statistic.initial, device=device, dtype=dtype)

    def begin_prompt(self, tokens: int | Tensor, quiet: int = 0) -> None:
        """Note that streams open with a prompt of this length, or of these. [B] int64. quiet: see the attribute."""
        self.prompt = torch.zeros_like(self.prompt).add_(torch.as_tensor(tokens, device=self.device))
        self.quiet = quiet
        self.version += 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V slots."""
        return self.tensors.keys.nbytes + self.tensors.values.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of everything else kept between steps: ranks, positions, statistics, free slots."""
        tensors = self.tensors
        paged = 0 if tensors.pages is None else tensors.pages.nbytes
        return paged + sum(x.nbytes for x in (tensors.rank, tensors.position, tensors.free, *tensors.states.values()))

    def attended(self, tokens_read: int | None, tokens: int = 1) -> int:
        """Slots that a block of `tokens` looks at, the last of `tokens_read`: whole buckets; all slots when None.

        Of heads that evict and differ: where asking costs nothing, what the fullest may need, rounded up to eighths
        of a power of two, so that it seldom changes.
        """
        if self.tensors.pages is not None and self.capacity is not None and self.device.type in MAY_ASK:
            most = int((self.tensors.free - self.tensors.row_base).max()) + tokens
            bucket = max(16, 1 << max(0, most.bit_length() - 4))
            return min(self.num_slots, -(-most // bucket) * bucket)
        if tokens_read is None or (self.uneven and self.capacity is not None):
            return self.num_slots
        used = self.cadence.held(tokens_read) if self.most is None else min(tokens_read, self.most)
        return min(self.num_slots, -(-used // self.budget.bucket) * self.budget.bucket)

    def used(self, tokens_read: int) -> int:
        """Slots of a head in use after `tokens_read` tokens, at most: those of the tokens held before, and that of the last one.

        In a pool the mean over heads, rounded up.
        """
        if self.tensors.pages is not None:
            return -(-self._tokens(tokens_read) // self.rows)
        if self.most is None:
            return self.cadence.held(tokens_read)
        return self.num_slots if self.uneven else min(tokens_read, self.most)

    @property
    def held_bytes(self) -> int:
        """Bytes of K and V of the tokens held. Syncs with the host."""
        held, position = self.tensors.rank < self.empty_rank, self.tensors.position
        return self.tensors.keys.held_bytes(held, position) + self.tensors.values.held_bytes(held, position)

    def held(self, positions: Tensor) -> Tensor:
        """Return whether the tokens at these positions of the first stream are cached. positions: [K] int64 -> [L, H, K] bool."""
        by_stream = (len(self.layers), self.streams, self.shape.heads, -1)
        position = self.tensors.position.view(by_stream)[:, 0]
        occupied = self.tensors.rank.view(by_stream)[:, 0] < self.empty_rank
        return torch.stack([((position == p) & occupied).any(-1) for p in positions], -1)

    def grow(self, tokens_read: int) -> None:
        """Make room for `tokens_read` tokens of a stream, in whole buckets or pages.

        Padded slots of a bounded cache have room from the start.
        """
        if self.capacity is None and self.cadence.held(tokens_read) > self.num_slots:
            buckets = -(-self.cadence.held(tokens_read) // self.budget.bucket)
            self._replace(self.tensors.extended(buckets * self.budget.bucket))
        if self.tensors.pages is not None and (pages := self._num_pages(tokens_read)) > self.tensors.pages.pages:
            self._replace(self.tensors.repaged(pages))

    def _tokens(self, tokens_read: int) -> int:
        """Tokens of a layer in use after `tokens_read` of each stream, at most, where rows differ."""
        return self.rows * (self.cadence.held(tokens_read) if self.most is None else min(tokens_read, self.most)) + self._surplus

    def _num_pages(self, tokens_read: int) -> int:
        """Pages of a layer's pool."""
        full = None if self.most is None else self.rows * self.most + self._surplus
        return pages_for(self._tokens(tokens_read), self.rows, full, PAGE)

    @property
    def most_victims(self) -> int:
        """Tokens that a row loses at once, at most."""
        return self.every if self.budget.floor is None else self.shape.heads * self.every + self._surplus

    def _surplus_of(self, of_rows: Tensor | None) -> int:
        """The attribute, of rows that held `of_rows` first. Syncs with the host."""
        if of_rows is None:
            return 0
        surplus = int(of_rows.sum()) - len(of_rows) * (int(of_rows.max()) if self.capacity is None else self.capacity)
        return surplus if self.budget.floor is None else max(0, surplus)

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Positions held, oldest first, per stream and KV head. Syncs with the host."""
        index = self.layers.index(layer)
        rank, position = (x.unflatten(0, (len(self.layers), -1))[index] for x in (self.tensors.rank, self.tensors.position))
        held = [
            [p for r, p in sorted(zip(ranks, positions, strict=True)) if r < self.empty_rank]
            for ranks, positions in zip(rank.tolist(), position.tolist(), strict=True)
        ]
        heads = self.shape.heads
        return [held[b * heads : (b + 1) * heads] for b in range(self.streams)]

    def fork(self, streams: Tensor) -> Slots:
        """Slots whose streams are copies of these. streams: [B'] int64."""

        def select(x: Tensor) -> Tensor:
            by_stream = x.view(len(self.layers), self.streams, self.shape.heads, *x.shape[1:])
            return by_stream[:, streams].flatten(0, 2)

        other = copy(self)
        other.streams, other.prompt, other.rows = len(streams), self.prompt[streams], len(streams) * self.shape.heads
        if self.budget.of_rows is not None:
            other.budget = replace(self.budget, of_rows=select(self.budget.of_rows))
            other._surplus = other._surplus_of(other.budget.of_rows)
        other._replace(self.tensors.mapped(select))
        return other

    def _replace(self, tensors: SlotTensors) -> None:
        self.tensors = tensors
        self.num_slots = self.empty_rank = tensors.rank.shape[1]
        self.version += 1
