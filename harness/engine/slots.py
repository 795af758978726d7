"""Cache slots: preallocated and written in place.

Eviction is one indexed write. The order of slots has no meaning; ranks order tokens by age. A slot is empty if its rank equals
the number of slots. Layers of one shape share their tensors, so that one operation can serve all of them.

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

BUCKET = 256  # slots; a cache that is not full attends over a multiple of this number


@dataclass(frozen=True)
class LayerShape:
    """Properties of a layer that its cache depends on. Layers that compare equal share their tensors.

    Attributes:
        group: query heads of a KV head.
        rotation: RoPE of the layer; None without RoPE.
        sliding_window: tokens that a query may see, its own included; None for all.
        plain_softmax: the softmax has no softcap and no sink logits.
        device: device of the layer's K and V, in a model that spans several devices; the model's device when None.
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
        """Return the bytes of slots for K and V in this layer."""
        if codec is None:
            return slots * self.heads * (self.key_dim + self.value_dim) * dtype.itemsize
        return self.heads * codec.allocated(slots, self.key_dim, self.value_dim, dtype.itemsize)

    def kept(self, capacity: int | None) -> int | None:
        """Return the tokens kept between steps, at most `sliding_window - 1`; None for all."""
        if self.sliding_window is None:
            return capacity
        return self.sliding_window - 1 if capacity is None else min(capacity, self.sliding_window - 1)


@dataclass(frozen=True)
class Budget:
    """Number of tokens that the heads of some layers may hold.

    Attributes:
        capacity: mean number of tokens per head after an eviction; None if nothing is evicted.
        floor: minimum number of tokens of a head, if the heads of a layer compete; None if each head has its own budget.
        of_rows: initial number of tokens of each row, if rows differ. It is the row's budget unless heads compete. [R, 1] int64.
        pages: pages that are evicted as a whole; None if single tokens are evicted.
        slots: slots of each row; None for as many as the capacity needs.
        bucket: slots by which a cache without a capacity grows.
    """

    capacity: int | None
    floor: int | None = None
    of_rows: Tensor | None = None
    pages: Pages | None = None
    slots: int | None = None
    bucket: int = BUCKET

    @classmethod
    def growing_from(cls, held: int) -> Budget:
        """Create the budget of a cache that grows, by about an eighth at a time, after its prompt was cut to `held` tokens."""
        bucket = min(BUCKET, max(16, 1 << max(0, (held // 8).bit_length() - 1)))
        return cls(None, slots=-(-(held + 1) // bucket) * bucket, bucket=bucket)


@dataclass(frozen=True)
class LayerHeads:
    """Heads of one layer that are stored in the same `Slots`.

    Attributes:
        heads: indices of the heads in the layer; all when None.
        output: output projection of the heads, as in `Written.output`. [H, G, E, Dv].
    """

    layer: int
    heads: tuple[int, ...] | None = None
    output: Tensor | None = None


@dataclass(frozen=True)
class Cadence:
    """Schedule of evictions: the number of tokens that a KV head holds, which the host computes without reading the cache.

    Attributes:
        capacity: tokens held after an eviction; None if no more tokens are evicted.
        every: tokens evicted at once, as soon as `capacity + every` tokens are held.
        origin: tokens read when the cache first held `capacity` tokens: the capacity, or the length of a prompt that was cut.
        dropped: tokens evicted from a cut prompt, if no more tokens are evicted afterwards; otherwise 0.
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
        """Return the number of tokens held after `tokens_read` tokens were read."""
        if self.capacity is None:
            return tokens_read - self.dropped
        return tokens_read if tokens_read < self.origin else self.capacity + (tokens_read - self.origin) % self.every

    def held_of(self, tokens_read: Tensor) -> Tensor:
        """Return `held` for numbers of tokens that only the device knows. Any shape, int64."""
        if self.capacity is None:
            return tokens_read - self.dropped
        return tokens_read.where(tokens_read < self.origin, self.capacity + (tokens_read - self.origin) % self.every)

    def evicts(self, tokens_read: int) -> bool:
        """Return whether tokens are evicted after the last of `tokens_read` tokens."""
        return self.capacity is not None and tokens_read > self.origin and (tokens_read - self.origin) % self.every == 0

    def runs(self, tokens_read: int, tokens: int) -> list[int]:
        """Return the lengths of runs that make up a block, such that evictions happen only at the ends of runs."""
        if self.capacity is None:
            return [tokens]
        end, lengths = tokens_read + tokens, list[int]()
        while tokens_read < end:
            due = self.origin + self.every * (max(0, tokens_read - self.origin) // self.every + 1)
            lengths.append(min(due, end) - tokens_read)
            tokens_read += lengths[-1]
        return lengths


class Slots:
    """Slots of layers, or of parts of layers, of one shape, with the statistics of their policy.

    Attributes:
        shape: shape of each layer; `shape.heads` counts the heads stored here.
        parts: layers, and their heads that are stored here.
        layers: indices of the layers in the model.
        capacity: mean number of tokens per head held between steps; None for all.
        every: tokens evicted at once.
        rows: number of rows of a layer: its heads in all streams.
        most: maximum number of tokens held during a step; None if unbounded.
        uneven: heads hold different numbers of tokens, which only the device knows.
        evicts_each_step: every row evicts one token after each step, once it is full.
        sees: parts of attention that statistics read.
        dtype: dtype of K and V when they are read.
        codec: codec of stored K and V; None stores them in `dtype`.
        empty_rank: rank that marks an empty slot; no token has this rank.
        keys_rotated: keys are stored rotated to their positions in the stream.
        state_dtype: dtype of statistics and softmax weights.
        layer_index: indices of the layers in the model. [L] int64.
        head_index: indices of the heads in their layers. [L, H] int64.
        prompt: length of each stream's prompt, in tokens; 0 without a prompt. [B] int64.
        quiet: statistics that see attention ignore the attention of the first `quiet` tokens.
        version: number of times that the tensors or the prompt were replaced. Earlier `Rows` are outdated.
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
        """Allocate the slots.

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
        self._surplus = self._surplus_of(budget.of_rows)  # tokens that a layer's rows hold in addition to the cadence
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
        """Return the initial state of a statistic."""
        size, dtype = ((rows, slots), self.state_dtype) if statistic.per == "slot" else ((rows,), torch.float64)
        return torch.full((*size, *statistic.shape(self.shape.sizes)), statistic.initial, device=device, dtype=dtype)

    def begin_prompt(self, tokens: int | Tensor, quiet: int = 0) -> None:
        """Set the length of the prompt that opens each stream. tokens: one length, or [B] int64; quiet: see the attribute."""
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
        """Return the number of slots that a block of `tokens` tokens attends over: a multiple of the bucket, or all slots.

        If heads evict and hold different numbers of tokens, a block attends over all slots. On devices that the host can
        read without waiting, it attends over the slots that the fullest head may need, rounded up to an eighth of a power
        of two so that the number seldom changes.

        Args:
            tokens_read: tokens of each stream up to the end of the block; None for all slots.
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
        """Return the maximum number of slots that a head uses for `tokens_read` tokens, including the newest token's slot.

        In a pool, return the mean over heads, rounded up.
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

        A bounded cache without pages has all of its slots from the start.
        """
        if self.capacity is None and self.cadence.held(tokens_read) > self.num_slots:
            buckets = -(-self.cadence.held(tokens_read) // self.budget.bucket)
            self._replace(self.tensors.extended(buckets * self.budget.bucket))
        if self.tensors.pages is not None and (pages := self._num_pages(tokens_read)) > self.tensors.pages.pages:
            self._replace(self.tensors.repaged(pages))

    def _tokens(self, tokens_read: int) -> int:
        """Return the maximum number of tokens in a layer after `tokens_read` tokens of each stream, if rows differ."""
        return self.rows * (self.cadence.held(tokens_read) if self.most is None else min(tokens_read, self.most)) + self._surplus

    def _num_pages(self, tokens_read: int) -> int:
        """Return the number of pages of a layer's pool."""
        full = None if self.most is None else self.rows * self.most + self._surplus
        return pages_for(self._tokens(tokens_read), self.rows, full, PAGE)

    @property
    def most_victims(self) -> int:
        """Maximum number of tokens that a row evicts at once."""
        return self.every if self.budget.floor is None else self.shape.heads * self.every + self._surplus

    def _surplus_of(self, of_rows: Tensor | None) -> int:
        """Return `_surplus` for rows that initially hold `of_rows` tokens. Syncs with the host."""
        if of_rows is None:
            return 0
        surplus = int(of_rows.sum()) - len(of_rows) * (int(of_rows.max()) if self.capacity is None else self.capacity)
        return surplus if self.budget.floor is None else max(0, surplus)

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Return the positions held, oldest first, by stream and KV head. Syncs with the host."""
        index = self.layers.index(layer)
        rank, position = (x.unflatten(0, (len(self.layers), -1))[index] for x in (self.tensors.rank, self.tensors.position))
        held = [
            [p for r, p in sorted(zip(ranks, positions, strict=True)) if r < self.empty_rank]
            for ranks, positions in zip(rank.tolist(), position.tolist(), strict=True)
        ]
        heads = self.shape.heads
        return [held[b * heads : (b + 1) * heads] for b in range(self.streams)]

    def fork(self, streams: Tensor) -> Slots:
        """Return slots whose streams are copies of the given streams. streams: [B'] int64."""

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
