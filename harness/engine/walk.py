"""The walk: a block of tokens through the caches of its layers.

What a layer keeps depends on that layer's attention alone, so a block of T tokens passes one layer at a time
and is walked inside it: write, attend, score, evict, next. A block of one token leaves the bookkeeping of all
layers to be done at once after the last; it is the same bookkeeping. Axis letters: L layers, B streams, H KV
heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, D head dim, P pairs of dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, causal, weights
from kvbench.harness.engine.closed_form import ClosedForm
from kvbench.harness.engine.kernels.choose import Kernels, kernels_for
from kvbench.harness.engine.rotary import LONGEST_STREAM, Rotation, rotate
from kvbench.harness.engine.slots import Rows, Slots
from kvbench.policies import PositionMode

_FEWEST = 4  # tokens of a block from which on a walk by a kernel is worth its copies
_SHARED = 2**20  # key elements of all layers up to which their turns are made at once


class Block:
    """Where the tokens of a block stand in their streams."""

    def __init__(self, steps: Tensor, valid: Tensor | None, seen: int | None) -> None:
        """Place a block.

        Args:
            steps: each token's index in its stream. [B, T] int64.
            valid: tokens that count; all when None. [B, T] bool.
            seen: tokens before the block; None when streams differ in length.
        """
        self.steps, self.valid, self.seen = steps, valid, seen
        self.tokens = steps.shape[1]
        self.used = None if seen is None else seen + self.tokens


class Walk:
    """Drives blocks through the layers of one `Slots`."""

    def __init__(
        self,
        slots: Slots,
        positions: PositionMode,
        limit: int,
        *,
        always: bool = False,
        closed: bool = True,
        compiled: bool = False,
    ) -> None:
        """Set up for a decoder's life.

        Args:
            slots: of the layers.
            positions: where RoPE puts a cached token.
            limit: the largest distance of mode `clamped`, in tokens.
            always: walk even where nothing can be evicted.
            closed: use the closed form where the policy has one.
            compiled: walk blocks, and take single tokens in, by compiled kernels where there are any.
        """
        self.slots, self.rotation = slots, slots.shape.rotation
        if self.rotation is not None:
            self.rotation.prepare(slots.keys.dtype)
        self._mode, self._limit, self._always = positions, limit, always
        self._longest = {"stream": LONGEST_STREAM, "clamped": limit + 1}.get(positions)  # the number of slots when None
        self._mass: Tensor | None = None  # softmax weights of all layers in a step. [R, G, S]
        self._steady = False
        longest = self._longest or slots.empty + 1
        self._closed_form = ClosedForm.of(slots, positions, limit, longest) if closed and not always else None
        self._kernels = kernels_for(slots, positions, limit, self._longest) if compiled and not always else Kernels()
        self._ordered = True  # the slots hold their tokens oldest first

    @property
    def has_closed_form(self) -> bool:
        """Whether blocks may be computed without walking them."""
        return self._closed_form is not None

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are walked by a compiled loop."""
        return self._kernels.walk is not None and self._closed_form is None

    @property
    def steps_by_kernel(self) -> bool:
        """Whether single tokens are taken in by a compiled kernel."""
        return self._kernels.step is not None

    @property
    def lost(self) -> str:
        """Why a kernel is missing that could be there; empty if none is."""
        return self._kernels.lost

    @property
    def plain_because(self) -> str:
        """Why no kernel can walk its blocks, where they have to be walked; empty otherwise."""
        return "" if self.has_closed_form or self.slots.capacity is None else self._kernels.plain_because

    def begin(self, block: Block) -> None:
        """Before the first layer: what all layers share."""
        slots = self.slots
        # Tokens of the block that come before the cache is full; None if the host can't know.
        self._ragged = block.seen is None
        self._room = None if slots.capacity is None or block.seen is None else slots.capacity - block.seen
        fits = block.used is not None and (slots.capacity is None or block.used <= slots.capacity)
        fits = fits and (self._mode != "clamped" or (block.used or 0) <= self._limit)
        self._fills = fits and block.tokens > 1 and not slots.states and not self._always
        self._closed = not self._fills and self._closed_form is not None and self._closed_form.takes(block.tokens, block.seen)
        self._by_kernel = False
        if self._fills or self._closed:
            self._steady = False
            return
        self._attended = slots.attended(block.used)
        rows = slots.rows(self._attended, slots.layers[0] if block.tokens > 1 else None)
        # Once the cache is full, the rank of the new token stays what it is, and so does where its query stands.
        steady = block.tokens == 1 and self._mode != "stream" and self._full(0)
        if not (steady and self._steady):
            self._place(block, rows)
        self._steady = steady
        self._steps, self._now = rows.each_head(block.steps), rows.each_stream(block.steps)
        self._valid = [None] * block.tokens if block.valid is None else rows.each_stream(block.valid)
        if block.tokens > 1:
            return
        self._hold(rows, 0)
        if slots.states:
            self._mass = rows.rank.new_empty(len(rows.rank), slots.shape.group, self._attended, dtype=slots.wide)
        if self._kernels.step is None:
            layers = len(slots.layers)
            self._used = [None] * layers if self._full(0) else rows.used().unflatten(0, (layers, -1)).unbind(0)
            self._turns: Sequence[Tensor | None] = [None] * layers
            if self.rotation is not None and rows.keys.numel() <= _SHARED:
                self._turns = self._key_turns(rows, self.rotation).unflatten(0, (layers, -1)).unbind(0)

    def _place(self, block: Block, rows: Rows) -> None:
        """Ranks of the new tokens, and where RoPE puts their queries."""
        slots = self.slots
        ranks = block.steps if slots.capacity is None else block.steps.clamp(max=slots.capacity)
        if self.rotation is not None and (block.tokens > 1 or self._kernels.step is None):
            at = block.steps if self._mode == "stream" else ranks
            at = torch.full_like(at, self._limit) if self._mode == "clamped" else at
            turns = self.rotation.turns(at, slots.keys.dtype, self._longest or slots.empty + 1)
            self._query_turns = {1.0: turns[:, None, None]}  # by scaling. [B, 1, 1, T, P]
        if block.valid is not None:  # an invalid token is written, but to a slot that stays empty
            ranks = ranks.masked_fill(~block.valid, slots.empty)
        self._ranks = rows.each_head(ranks)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, block: Block) -> Tensor:
        """Take a block into one layer, each token seeing what is kept when it comes.

        Args:
            layer: index in the model.
            query: unrotated. [B, H * G, T, D].
            keys: unrotated. [B, H, T, D].
            values: [B, H, T, Dv].
            terms: of this layer's attention.
            block: where the tokens stand.

        Returns:
            [B, H * G, T, Dv].
        """
        slots, shape, seen = self.slots, self.slots.shape, block.seen or 0
        if block.tokens == 1 and self._kernels.step is not None:
            rows = slots.rows(self._attended, layer)
            return self._kernels.step(slots, rows, query, keys, values, terms.scaling, self._mass_of(layer))
        if self.rotation is not None:
            query, keys = self.rotation.pair(query), self.rotation.pair(keys)
        query = query.view(query.shape[0], shape.heads, shape.group, *query.shape[2:])
        if self._fills:
            return self._fill(layer, query, keys, values, terms, seen).flatten(1, 2)
        if self._closed:
            assert self._closed_form is not None
            rows = slots.rows(slots.empty, layer)
            held = rows.oldest_first(min(seen, slots.capacity or 0), self._ordered)
            return self._closed_form(rows, query, keys, values, terms, held, seen).flatten(1, 2)
        query = query * terms.scaling if self.rotation is None else rotate(query, self._scaled_turns(terms.scaling))
        rows = slots.rows(self._attended, layer)
        if block.tokens == 1:
            at, size = slots.layers.index(layer), len(rows.keys)
            token = (query.reshape(size, shape.group, -1), keys.reshape(size, -1), values.reshape(size, -1))
            out, mass = self._step(rows, *token, terms, self._used[at], self._turns[at])
            asked = self._mass_of(layer)
            if asked is not None:
                asked.copy_(mass)
            return out.view(query.shape[0], -1, 1, shape.value_dim)
        if self._kernels.walk is not None and block.tokens >= _FEWEST and block.seen is not None:
            self._by_kernel = True
            return self._kernels.walk(slots, rows, layer, query, keys, values, self._ordered, seen).flatten(1, 2)
        return self._within(rows, query, keys, values, terms).flatten(1, 2)

    def end(self, block: Block) -> None:
        """After the last layer: the bookkeeping of a block of one token, all layers at once."""
        full = self.slots.capacity is not None and (block.used is None or block.used > self.slots.capacity)
        in_order = self._by_kernel and self._kernels.walk is not None and self._kernels.walk.leaves_ordered
        self._ordered = self._closed or in_order or (self._ordered and not full)
        if self._fills or block.tokens > 1:
            return
        rows = self.slots.rows(self._attended)
        if self._kernels.release is not None and block.valid is None and not self._ragged:
            self._kernels.release(self.slots, rows, self._mass, self._step_now, self._full(0))
        else:
            if self._mass is not None:
                rows.update(self._mass, self._valid[0])
            rows.release(self._valid[0], self._full(0), self._ragged)
        self._mass = None
        self._turns, self._used = [], []  # as large as the cache, and of no use to the next step

    def host_state(self, seen: int) -> tuple[int, int, bool]:
        """All that the host decides about a step of one token, after so many."""
        full = self.slots.capacity is not None and seen >= self.slots.capacity
        self._steady = False  # a captured step makes all that it reads
        return self.slots.version, self.slots.attended(seen + 1), full

    def replayed(self, seen: int) -> None:
        """A step after so many tokens was replayed: what the host would have noted."""
        self._steady = False
        self._ordered = self._ordered and (self.slots.capacity is None or seen < self.slots.capacity)

    def fork(self, streams: Tensor) -> Walk:
        """A walk over copies of these streams. streams: [B'] int64."""
        other = copy(self)
        other.slots, other._steady = self.slots.fork(streams), False
        return other

    def _within(self, rows: Rows, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """The definition, token by token inside one layer. -> [B, H, G, T, Dv]."""
        streams, heads = query.shape[:2]
        parts = [x.movedim(-2, 0).flatten(1, 2).contiguous().unbind(0) for x in (query, keys, values)]
        out = values.new_empty(values.shape[2], *parts[0][0].shape[:2], values.shape[3])  # small answers would litter the heap
        for t, (q, k, v) in enumerate(zip(*parts, strict=True)):
            self._hold(rows, t)
            _, mass = self._step(rows, q, k, v, terms, None if self._full(t) else rows.used(), into=out[t])
            rows.update(mass, self._valid[t])
            rows.release(self._valid[t], self._full(t), self._ragged)
        return out.unflatten(1, (streams, heads)).movedim(0, 3)

    def _hold(self, rows: Rows, t: int) -> None:
        """Note the t-th token of the block in its free slots."""
        self._step_now = self._steps[t]
        rows.hold(self._ranks[t], self._step_now, self._now[t])

    def _scaled_turns(self, scaling: float) -> Tensor:
        """RoPE of the queries with the scaling of scores taken in; layers mostly share it. [B, 1, 1, T, P]."""
        if scaling not in self._query_turns:
            self._query_turns[scaling] = self._query_turns[1.0] * scaling
        return self._query_turns[scaling]

    def _mass_of(self, layer: int) -> Tensor | None:
        """Where the softmax weights of one layer go in a step, if anybody asks for them. [N, G, S]."""
        if self._mass is None:
            return None
        at, size = self.slots.layers.index(layer), self.slots.streams * self.slots.shape.heads
        return self._mass[at * size : (at + 1) * size]

    def _full(self, t: int) -> bool:
        """Whether the t-th token of the block finds, as far as the host knows, no unused slot after it."""
        return self._room is not None and t >= self._room

    def _step(
        self,
        rows: Rows,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: Terms,
        used: Tensor | None,
        turns: Tensor | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One token in one layer: written, then attending to all that is held, itself included.

        Args:
            rows: of the layer.
            query: rotated and scaled. [N, G, D].
            key: unrotated. [N, D].
            value: [N, Dv].
            terms: of this layer's attention.
            used: slots that hold a token; all when None. [N, 1, S] bool.
            turns: RoPE of the cached keys where it is at hand. [N, S, P].
            into: where to put the output; a new tensor when None. [N, G, Dv].

        Returns:
            The output [N, G, Dv] and the softmax weights [N, G, S].
        """
        rows.write(key, value)
        scores = torch.bmm(query, self._rotated(rows, turns).transpose(1, 2))
        mass = weights(scores, terms, self.slots.shape.heads, used)
        return torch.bmm(mass.to(value.dtype), rows.values, out=into), mass

    def _rotated(self, rows: Rows, turns: Tensor | None) -> Tensor:
        """Keys turned to where the position mode puts them. [N, S, D]."""
        if self.rotation is None:
            return rows.keys
        return rotate(rows.keys, self._key_turns(rows, self.rotation) if turns is None else turns)

    def _key_turns(self, rows: Rows, rotation: Rotation) -> Tensor:
        """RoPE of the cached keys. [N, S, P], or for all layers [R, S, P]."""
        if self._mode == "cache":
            at = rows.rank
        elif self._mode == "stream":
            at = rows.position.clamp(min=0)
        else:  # the query stands at `limit`, so that every distance is at most that
            at = self._limit - (self._step_now[: len(rows.rank), None] - rows.position).clamp(0, self._limit)
        return rotation.turns(at, rows.keys.dtype, self._longest or self.slots.empty + 1)

    def _fill(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, seen: int) -> Tensor:
        """A block that all fits, attended in one go: rank = position = slot. -> [B, H, G, T, Dv]."""
        used = seen + keys.shape[2]
        rows, streams = self.slots.rows(self.slots.empty, layer), query.shape[0]
        rows.keys[:, seen:used], rows.values[:, seen:used] = keys.flatten(0, 1), values.flatten(0, 1)
        rows.rank[:, seen:used] = rows.position[:, seen:used] = torch.arange(seen, used, device=keys.device)
        rows.free += keys.shape[2]
        kept, held = rows.keys[:, :used].unflatten(0, (streams, -1)), rows.values[:, :used].unflatten(0, (streams, -1))
        if self.rotation is not None:
            turns = self.rotation.turns(torch.arange(used, device=keys.device), keys.dtype, used)
            kept, query = rotate(kept, turns), rotate(query, turns[seen:])
        return causal(query, kept, held, terms)
