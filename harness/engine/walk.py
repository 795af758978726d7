"""The walk: a block of tokens through the caches of its layers.

What a layer keeps depends on that layer's attention alone, so a block of T tokens passes one layer at a time
and is walked inside it: write, attend, score, evict, next. A block of one token leaves the bookkeeping of all
layers to be done at once after the last; it is the same bookkeeping. Axis letters: L layers, B streams, H KV
heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, D head dim, P pairs of dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.engine.attention import Terms, causal, weights
from harness.engine.banded import Sinks, banded
from harness.engine.compiled_walk import CompiledWalk, Held
from harness.engine.rotary import LONGEST_STREAM, Rotation, rotate
from harness.engine.slots import Rows, Slots
from policies import PositionMode

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
            compiled: walk blocks by a compiled loop where there is one.
        """
        self.slots, self.rotation = slots, slots.shape.rotation
        self._mode, self._limit, self._always, self._may_close = positions, limit, always, closed
        self._longest = {"stream": LONGEST_STREAM, "clamped": limit + 1}.get(positions)
        self._mass: list[Tensor] = []
        self._steady = False
        self._band = None if always or not closed or slots.states else _band(slots)
        self._compiled = CompiledWalk.of(slots, positions) if compiled and not always and self._band is None else None
        self._ordered = True  # the slots hold their tokens oldest first

    @property
    def has_closed_form(self) -> bool:
        """Whether blocks may be computed without walking them."""
        return self._band is not None

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are walked by a compiled loop."""
        return self._compiled is not None

    def begin(self, block: Block) -> None:
        """Before the first layer: what all layers share."""
        slots = self.slots
        # Tokens of the block that come before the cache is full; None if the host can't know.
        self._ragged = block.seen is None
        self._room = None if slots.capacity is None or block.seen is None else slots.capacity - block.seen
        fits = block.used is not None and (slots.capacity is None or block.used <= slots.capacity)
        fits = fits and (self._mode != "clamped" or (block.used or 0) <= self._limit)
        self._fills = fits and block.tokens > 1 and not slots.states and not self._always
        self._closed = not self._fills and self._known(block)
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
        if block.tokens == 1:
            self._hold(rows, 0)
            layers = len(slots.layers)
            self._used = [None] * layers if self._full(0) else rows.used().unflatten(0, (layers, -1)).unbind(0)
            self._turns: Sequence[Tensor | None] = [None] * layers
            if self.rotation is not None and rows.keys.numel() <= _SHARED:
                self._turns = self._key_turns(rows, self.rotation).unflatten(0, (layers, -1)).unbind(0)

    def _place(self, block: Block, rows: Rows) -> None:
        """Ranks of the new tokens, and where RoPE puts their queries."""
        slots = self.slots
        ranks = block.steps if slots.capacity is None else block.steps.clamp(max=slots.capacity)
        if self.rotation is not None:
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
        if self.rotation is not None:
            query, keys = self.rotation.pair(query), self.rotation.pair(keys)
        slots, shape = self.slots, self.slots.shape
        query = query.view(query.shape[0], shape.heads, shape.group, *query.shape[2:])
        if self._fills:
            return self._fill(layer, query, keys, values, terms, block.seen or 0).flatten(1, 2)
        if self._closed:
            return self._in_closed_form(layer, query, keys, values, terms, block.seen or 0).flatten(1, 2)
        query = query * terms.scaling if self.rotation is None else rotate(query, self._scaled_turns(terms.scaling))
        rows = self.slots.rows(self._attended, layer)
        if block.tokens == 1:
            at, size = self.slots.layers.index(layer), len(rows.keys)
            token = (query.reshape(size, shape.group, -1), keys.reshape(size, -1), values.reshape(size, -1))
            out, mass = self._step(rows, *token, terms, self._used[at], self._turns[at])
            if self.slots.states:
                self._mass.append(mass)
            return out.view(query.shape[0], -1, 1, shape.value_dim)
        if self._compiled is not None and CompiledWalk.takes(block.tokens, block.seen, terms):
            self._by_kernel = True
            held = self._oldest_first(rows, min(block.seen or 0, slots.capacity or 0))
            return self._compiled(rows, layer, query, keys, values, held, block.seen or 0).flatten(1, 2)
        return self._within(rows, query, keys, values, terms).flatten(1, 2)

    def end(self, block: Block) -> None:
        """After the last layer: the bookkeeping of a block of one token, all layers at once."""
        full = self.slots.capacity is not None and (block.used is None or block.used > self.slots.capacity)
        self._ordered = self._closed or self._by_kernel or (self._ordered and not full)
        if self._fills or block.tokens > 1:
            return
        rows = self.slots.rows(self._attended)
        if self.slots.states:
            rows.update(torch.cat(self._mass), self._valid[0])
            self._mass = []
        rows.release(self._valid[0], self._full(0), self._ragged)
        self._turns, self._used = [], []  # as large as the cache, and of no use to the next step

    def fork(self, streams: Tensor) -> Walk:
        """A walk over copies of these streams. streams: [B'] int64."""
        other = Walk(self.slots.fork(streams), self._mode, self._limit, always=self._always, closed=self._may_close)
        other._compiled = self._compiled and CompiledWalk.of(other.slots, self._mode)
        other._ordered = self._ordered
        return other

    def _known(self, block: Block) -> bool:
        """Whether the block can be computed in closed form: all that is kept is known, and where it stands."""
        if self._band is None or block.tokens == 1 or block.seen is None or block.used is None:
            return False
        sinks, window = self._band
        if self._mode != "clamped" or self.rotation is None:
            return True
        crossing = block.used > self._limit and block.seen < self._limit + sinks and sinks > 0
        return window <= self._limit and not crossing  # while sinks reach the limit one by one they are walked

    def _in_closed_form(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, seen: int) -> Tensor:
        """A block of a policy that keeps the first tokens and the newest. -> [B, H, G, T, Dv]."""
        assert self._band is not None
        assert self.slots.capacity is not None
        (sinks, window), streams, capacity, tokens = self._band, query.shape[0], self.slots.capacity, keys.shape[2]
        rows, before, used = self.slots.rows(self.slots.empty, layer), min(seen, capacity), seen + tokens
        held = self._oldest_first(rows, before)
        every_key = torch.cat([held.keys.unflatten(0, (streams, -1)), keys], 2)
        every_value = torch.cat([held.values.unflatten(0, (streams, -1)), values], 2)
        gap = seen > capacity  # between the sinks and the window
        first = seen - window if gap else max(0, seen - window)
        near = slice(sinks if gap else first, None)
        first_tokens = None
        if sinks and used - 1 > window:
            first_tokens = Sinks(query, every_key[:, :, :sinks], every_value[:, :, :sinks])
        near_query, near_keys = query, every_key[:, :, near]
        if self.rotation is not None:
            at = torch.arange(near_keys.shape[2], device=keys.device)
            turns = self.rotation.turns(at, keys.dtype, near_keys.shape[2])
            near_query, near_keys = rotate(query, turns[-tokens:]), rotate(near_keys, turns)
            if first_tokens is not None:
                first_tokens = self._placed(first_tokens, seen, self.rotation)
        out = banded(
            near_query, near_keys, every_value[:, :, near], window, first_tokens, terms._replace(sliding_window=None), first
        )
        self._keep(rows, every_key.flatten(0, 1), every_value.flatten(0, 1), seen, used)
        return out

    def _placed(self, sinks: Sinks, seen: int, rotation: Rotation) -> Sinks:
        """The first tokens and the block's queries, rotated to where the position mode puts them."""
        count, tokens, capacity = sinks.keys.shape[2], sinks.query.shape[3], self.slots.capacity or 0
        at = torch.arange(seen, seen + tokens, device=sinks.keys.device)
        key_at = torch.arange(count, device=sinks.keys.device)
        if self._mode == "cache":
            at = at.clamp(max=capacity)
        elif self._mode == "clamped" and seen >= self._limit:
            at, key_at = torch.full_like(at, self._limit), torch.zeros_like(key_at)
        longest = self._longest or self.slots.empty + 1
        dtype = sinks.keys.dtype
        return Sinks(
            rotate(sinks.query, rotation.turns(at, dtype, longest)), rotate(sinks.keys, rotation.turns(key_at, dtype, longest)),
            sinks.values,
        )  # fmt: skip

    def _oldest_first(self, rows: Rows, before: int) -> Held:
        """What is held, by rank."""
        states = [x.flatten(0, 1) for x in rows.states.values()]
        if self._ordered:
            return Held(
                rows.keys[:, :before], rows.values[:, :before], rows.position[:, :before], [x[:, :before] for x in states]
            )
        order = rows.rank.argsort(-1)[:, :before]
        keys, values = (x.take_along_dim(order[..., None], 1) for x in (rows.keys, rows.values))
        return Held(keys, values, rows.position.take_along_dim(order, 1), [x.take_along_dim(order, 1) for x in states])

    def _keep(self, rows: Rows, keys: Tensor, values: Tensor, seen: int, used: int) -> None:
        """What is held once the block is over, oldest first in the slots. keys, values: all held and new. [N, L, D]."""
        assert self._band is not None
        window, capacity = self._band[1], self.slots.capacity or 0
        kept = min(used, capacity)
        tail = kept if used <= capacity else window
        parts = [slice(0, kept - tail), slice(keys.shape[1] - tail, keys.shape[1])]
        rows.keys[:, :kept] = torch.cat([keys[:, p] for p in parts], 1)
        rows.values[:, :kept] = torch.cat([values[:, p] for p in parts], 1)
        rows.rank[:, :kept] = torch.arange(kept, device=keys.device)
        rows.rank[:, kept:] = self.slots.empty
        rows.position[:, : kept - tail] = torch.arange(kept - tail, device=keys.device)
        rows.position[:, kept - tail : kept] = torch.arange(used - tail, used, device=keys.device)
        rows.use(kept)

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


def _band(slots: Slots) -> tuple[int, int] | None:
    """(sinks, window) of what these layers keep, where that is known beforehand; a sliding window counts too."""
    if slots.capacity is None:
        return None
    sliding = slots.shape.sliding_window
    if sliding is None:
        return slots.policy.band(slots.capacity)
    return (0, slots.capacity) if slots.capacity == sliding - 1 else None  # what no later query may see goes first
