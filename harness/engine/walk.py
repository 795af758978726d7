"""The walk: a block of tokens through the cache of every layer.

What happens to a token. `Walk.begin` looks at a block once and returns its plan. The model then calls `attend` in every layer,
which follows the plan, and `end` is called after the last layer. By the definition (`PlainWalk`), a layer takes the tokens of its
block one after the other:

1. the token's rank and position are entered for the free slot, and its unrotated key and its value are written there;
2. its query attends to all tokens held, itself included, whose keys are rotated to where the position mode puts them;
3. the attention updates the policy's statistics;
4. once the cache is full, the token worth least gives up its slot, which is free for the next token.

What a layer keeps depends on that layer's attention alone, so a whole block can pass one layer before it enters the next. The
other plans compute the same faster. `Step`, for a block of one token, does 3 and 4 for all layers at once, in `end`. `Fill`
attends in one go while nothing has to be evicted. `Closed` computes banded attention where it is known beforehand what is kept.
`CompiledWalk` leaves the loop over tokens to a kernel.

Axis letters: L layers, B streams, H KV heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, D key dim,
Dv value dim, P pairs of dims.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, causal, weights
from kvbench.harness.engine.closed_form import closed_form
from kvbench.harness.engine.kernels.choose import Kernels, kernels_for
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.plan import Block, Closed, CompiledWalk, Fill, Places, PlainWalk, Plan, QueryFactors, Step
from kvbench.harness.engine.rotary import LONGEST_STREAM, Rotation, rotate
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode

_MIN_COMPILED_TOKENS = 4  # shorter blocks don't repay the kernel's copies
_MAX_BATCHED_ROPE_ELEMENTS = 2**20  # of the keys of all layers; above this, each layer computes its own RoPE


class _Placement(NamedTuple):
    """Ranks of a block's tokens, in the rows it is walked in, and the RoPE of its queries."""

    ranks: tuple[Tensor, ...]  # T times [R] int64
    query_factors: QueryFactors | None


class Walk:
    """Drives blocks through the layers of one `Slots`."""

    def __init__(self, slots: Slots, positions: PositionMode, limit: int, method: Method = EAGER) -> None:
        """Set up for a decoder's life.

        Args:
            slots: of the layers.
            positions: where RoPE puts a cached token.
            limit: the largest distance of mode `clamped`, in tokens.
            method: shortcuts that may be taken.
        """
        self.slots, self.rotation = slots, slots.shape.rotation
        if self.rotation is not None:
            self.rotation.prepare(slots.tensors.keys.dtype)
        self._mode, self._limit, self._method = positions, limit, method
        self._max_position = {"stream": LONGEST_STREAM, "clamped": limit + 1}.get(positions)  # the number of slots when None
        self._closed_form = closed_form(slots, positions, limit, self._rope_length) if method.closed_form else None
        compiled = method.walk_kernel or method.step_kernel
        self._kernels = kernels_for(slots, positions, limit, self._max_position) if compiled else Kernels()
        self._ordered = True  # the slots hold their tokens oldest first
        self._steady: _Placement | None = None  # of the step before, where that of the next one is the same

    @property
    def has_closed_form(self) -> bool:
        """Whether blocks may be computed without walking them."""
        return self._closed_form is not None

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are walked by a compiled loop."""
        return self._method.walk_kernel and self._kernels.walk is not None and self._closed_form is None

    @property
    def steps_by_kernel(self) -> bool:
        """Whether single tokens are taken in by a compiled kernel."""
        return self._method.step_kernel and self._kernels.step is not None

    @property
    def lost(self) -> str:
        """Why a kernel is missing that could be there; empty if none is."""
        return self._kernels.lost

    @property
    def plain_because(self) -> str:
        """Why no kernel can walk its blocks, where they have to be walked; empty otherwise."""
        return "" if self.has_closed_form or self.slots.capacity is None else self._kernels.plain_because

    def begin(self, block: Block) -> Plan:
        """Before the first layer: decide how the block is read, and compute what its layers share."""
        plan = self._plan_of_many(block) if block.tokens > 1 else self._plan_of_one(block)
        if not isinstance(plan, Step):
            self._steady = None
        return plan

    def attend(self, plan: Plan, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Take a block into one layer, each token seeing what is kept when it comes.

        Args:
            plan: of the block.
            layer: index in the model.
            query: unrotated. [B, H * G, T, D].
            keys: unrotated. [B, H, T, D].
            values: [B, H, T, Dv].
            terms: of this layer's attention.

        Returns:
            [B, H * G, T, Dv].
        """
        if isinstance(plan, Step) and plan.kernel is not None:
            rows, mass = self.slots.rows(plan.attended, layer), plan.mass_of_layer[self.slots.layers.index(layer)]
            return plan.kernel(self.slots, rows, query, keys, values, terms.scaling, mass)
        if self.rotation is not None:
            query, keys = self.rotation.pair(query), self.rotation.pair(keys)
        if isinstance(plan, Step):
            return self._step(plan, layer, query, keys, values, terms)
        query = query.unflatten(1, (self.slots.shape.heads, self.slots.shape.group))
        match plan:
            case Fill():
                out = self._fill(plan, layer, query, keys, values, terms)
            case Closed():
                rows = self.slots.rows(self.slots.num_slots, layer)
                held = rows.oldest_first(min(plan.seen, self.slots.capacity or 0), plan.ordered)
                out = plan.form(rows, query, keys, values, terms, held, plan.seen)
            case CompiledWalk():
                rows, query = self.slots.rows(plan.attended, layer), _rotated_and_scaled(query, plan.query_factors, terms)
                out = plan.kernel(self.slots, rows, layer, query, keys, values, plan.ordered, plan.seen)
            case PlainWalk():
                out = self._walk(plan, layer, query, keys, values, terms)
        return out.flatten(1, 2)

    def end(self, plan: Plan, block: Block) -> None:
        """After the last layer: note the order of the slots, and do the bookkeeping of a step for all layers at once."""
        evicted = self.slots.capacity is not None and (block.end is None or block.end > self.slots.capacity)
        match plan:
            case Closed():
                self._ordered = True
            case CompiledWalk():
                self._ordered = plan.kernel.leaves_ordered or (self._ordered and not evicted)
            case _:
                self._ordered = self._ordered and not evicted
        if isinstance(plan, Step):
            self._finish(plan)

    def graph_key(self, seen: int) -> tuple[int, int, bool]:
        """Identifies the CUDA graph for the step after `seen` tokens: all that the host decides about it."""
        full = self.slots.capacity is not None and seen >= self.slots.capacity
        return self.slots.version, self.slots.attended(seen + 1), full

    def forget_placement(self) -> None:
        """Make the next step compute all that it reads, as a captured one must."""
        self._steady = None

    def note_replay(self, seen: int) -> None:
        """Note what an eager step after `seen` tokens would have noted."""
        self._steady = None
        self._ordered = self._ordered and (self.slots.capacity is None or seen < self.slots.capacity)

    def fork(self, streams: Tensor) -> Walk:
        """A walk over copies of these streams. streams: [B'] int64."""
        other = copy(self)
        other.slots, other._steady = self.slots.fork(streams), None
        return other

    def _plan_of_many(self, block: Block) -> Plan:
        """How a block of several tokens is read."""
        if self._can_fill(block):
            return Fill(block.seen or 0)
        if block.seen is not None and self._closed_form is not None and self._closed_form.takes(block.tokens, block.seen):
            return Closed(self._closed_form, block.seen, self._ordered)
        attended = self.slots.attended(block.end)
        rows = self.slots.rows(attended, self.slots.layers[0])  # places are the same in every layer
        ranks, query_factors = self._placed(block, rows)
        compiled = self._method.walk_kernel and block.tokens >= _MIN_COMPILED_TOKENS and block.seen is not None
        if compiled and self._kernels.walk is not None:
            return CompiledWalk(self._kernels.walk, query_factors, attended, block.seen or 0, self._ordered)
        return PlainWalk(self._places(block, rows, ranks), query_factors, attended)

    def _plan_of_one(self, block: Block) -> Step:
        """How a single token is read; its rank and position are entered here, for all layers at once."""
        slots, kernel = self.slots, self._kernels.step if self._method.step_kernel else None
        attended = slots.attended(block.end)
        rows = slots.rows(attended)
        placement = None if block.seen is None else self._steady
        placement = placement or self._placed(block, rows, with_queries=kernel is None)
        places = self._places(block, rows, placement.ranks)
        # Once the cache is full, the rank of the newest token stays the same, and so does the place of its query.
        self._steady = placement if self._mode != "stream" and places.evicts(0) else None
        rows.place(places.ranks[0], places.steps[0], places.now[0])
        layers = len(slots.layers)
        nothing = [None] * layers
        mass = (
            rows.rank.new_empty(len(rows.rank), slots.shape.group, attended, dtype=slots.wide) if slots.tensors.states else None
        )
        mass_of_layer = nothing if mass is None else mass.unflatten(0, (layers, -1)).unbind(0)
        if kernel is not None:
            return Step(places, rows, attended, mass, mass_of_layer, kernel, None)
        used = nothing if places.evicts(0) else rows.used().unflatten(0, (layers, -1)).unbind(0)
        key_factors = nothing
        if self.rotation is not None and rows.keys.numel() <= _MAX_BATCHED_ROPE_ELEMENTS:
            key_factors = self._key_factors(rows, self.rotation, places.steps[0]).unflatten(0, (layers, -1)).unbind(0)
        return Step(places, rows, attended, mass, mass_of_layer, None, placement.query_factors, used, key_factors)

    def _can_fill(self, block: Block) -> bool:
        """Whether nothing that the block's tokens do depends on the walk: no eviction, no statistics, true distances."""
        if block.end is None or self.slots.tensors.states or not self._method.fill:
            return False
        capacity = self.slots.capacity
        return (capacity is None or block.end <= capacity) and (self._mode != "clamped" or block.end <= self._limit)

    def _placed(self, block: Block, rows: Rows, with_queries: bool = True) -> _Placement:
        """Ranks of the new tokens, and where RoPE puts their queries."""
        slots = self.slots
        ranks = block.steps if slots.capacity is None else block.steps.clamp(max=slots.capacity)
        query_factors = None
        if self.rotation is not None and with_queries:
            at = block.steps if self._mode == "stream" else ranks
            at = torch.full_like(at, self._limit) if self._mode == "clamped" else at
            factors = self.rotation.factors(at, slots.tensors.keys.dtype, self._rope_length)
            query_factors = QueryFactors(factors[:, None] if block.tokens == 1 else factors[:, None, None])
        if block.valid is not None:  # an invalid token is written, but to a slot that stays empty
            ranks = ranks.masked_fill(~block.valid, slots.empty_rank)
        return _Placement(rows.each_head(ranks), query_factors)

    def _places(self, block: Block, rows: Rows, ranks: tuple[Tensor, ...]) -> Places:
        """Where the tokens go in these rows."""
        capacity, seen = self.slots.capacity, block.seen
        return Places(
            ranks=ranks,
            steps=rows.each_head(block.steps),
            now=rows.each_stream(block.steps),
            valid=[None] * block.tokens if block.valid is None else rows.each_stream(block.valid),
            room=None if capacity is None or seen is None else capacity - seen,
            ragged=seen is None,
        )

    def _walk(self, plan: PlainWalk, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """The definition, token by token inside one layer. -> [B, H, G, T, Dv]."""
        streams, heads = query.shape[:2]
        places, rows = plan.places, self.slots.rows(plan.attended, layer)
        query = _rotated_and_scaled(query, plan.query_factors, terms)
        parts = [x.movedim(-2, 0).flatten(1, 2).contiguous().unbind(0) for x in (query, keys, values)]
        out = values.new_empty(values.shape[2], *parts[0][0].shape[:2], values.shape[3])  # one tensor: many small ones are slow
        for t, (q, k, v) in enumerate(zip(*parts, strict=True)):
            rows.place(places.ranks[t], places.steps[t], places.now[t])
            rows.write(k, v)
            used = None if places.evicts(t) else rows.used()
            _, mass = self._attend_one(rows, q, terms, used, self._key_factors_of(rows, places.steps[t]), out[t])
            rows.update(mass, places.valid[t])
            rows.release(places.valid[t], places.evicts(t), places.ragged)
        return out.unflatten(1, (streams, heads)).movedim(0, 3)

    def _step(self, plan: Step, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """One token in one layer, in plain PyTorch. [B, H * G, 1, D], [B, H, 1, D], [B, H, 1, Dv] -> [B, H * G, 1, Dv]."""
        at, rows = self.slots.layers.index(layer), self.slots.rows(plan.attended, layer)
        streams, size, group = query.shape[0], len(rows.keys), self.slots.shape.group
        query = _rotated_and_scaled(query, plan.query_factors, terms).reshape(size, group, -1)
        rows.write(keys.reshape(size, -1), values.reshape(size, -1))
        factors = plan.key_factors[at]
        if factors is None:
            factors = self._key_factors_of(rows, plan.places.steps[0])
        out, mass = self._attend_one(rows, query, terms, plan.used[at], factors)
        asked = plan.mass_of_layer[at]
        if asked is not None:
            asked.copy_(mass)
        return out.view(streams, -1, 1, self.slots.shape.value_dim)

    def _finish(self, plan: Step) -> None:
        """Update the statistics with a step's attention, and find the slots of the next token."""
        places, kernel = plan.places, self._kernels.release if self._method.step_kernel else None
        if kernel is not None and places.valid[0] is None and not places.ragged:
            kernel(self.slots, plan.rows, plan.mass, places.steps[0], places.evicts(0))
            return
        if plan.mass is not None:
            plan.rows.update(plan.mass, places.valid[0])
        plan.rows.release(places.valid[0], places.evicts(0), places.ragged)

    def _attend_one(
        self,
        rows: Rows,
        query: Tensor,
        terms: Terms,
        used: Tensor | None,
        key_factors: Tensor | None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One query a row over all that is held.

        Args:
            rows: of the layer.
            query: rotated and scaled. [N, G, D].
            terms: of this layer's attention.
            used: slots that hold a token; all when None. [N, 1, S] bool.
            key_factors: RoPE of the cached keys; None without RoPE. [N, S, P].
            into: where to put the output; a new tensor when None. [N, G, Dv].

        Returns:
            The output [N, G, Dv] and the softmax weights [N, G, S].
        """
        keys = rows.keys if key_factors is None else rotate(rows.keys, key_factors)
        mass = weights(torch.bmm(query, keys.transpose(1, 2)), terms, self.slots.shape.heads, used)
        return torch.bmm(mass.to(rows.values.dtype), rows.values, out=into), mass

    def _key_factors_of(self, rows: Rows, steps: Tensor) -> Tensor | None:
        """RoPE of the cached keys of one layer; None without RoPE. [N, S, P]."""
        return None if self.rotation is None else self._key_factors(rows, self.rotation, steps)

    def _key_factors(self, rows: Rows, rotation: Rotation, steps: Tensor) -> Tensor:
        """RoPE of the cached keys, by position mode.

        Args:
            rows: of one layer, or of all.
            rotation: of these layers.
            steps: of the token that attends. [R] int64; of one layer, its rows are the first, as they are alike in every layer.

        Returns:
            [R, S, P] complex.
        """
        if self._mode == "cache":
            at = rows.rank
        elif self._mode == "stream":
            at = rows.position.clamp(min=0)
        else:  # the query stands at `limit`, which bounds every distance
            at = self._limit - (steps[: len(rows.rank), None] - rows.position).clamp(0, self._limit)
        return rotation.factors(at, rows.keys.dtype, self._rope_length)

    def _fill(self, plan: Fill, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """A block that all fits: causal attention in one go. -> [B, H, G, T, Dv]."""
        first, end, streams = plan.seen, plan.seen + keys.shape[2], query.shape[0]
        rows = self.slots.rows(self.slots.num_slots, layer)
        rows.keys[:, first:end], rows.values[:, first:end] = keys.flatten(0, 1), values.flatten(0, 1)
        rows.rank[:, first:end] = rows.position[:, first:end] = torch.arange(first, end, device=keys.device)
        rows.free += keys.shape[2]
        all_keys, all_values = (x[:, :end].unflatten(0, (streams, -1)) for x in (rows.keys, rows.values))
        if self.rotation is not None:
            factors = self.rotation.factors(torch.arange(end, device=keys.device), keys.dtype, end)
            all_keys, query = rotate(all_keys, factors), rotate(query, factors[first:])
        return causal(query, all_keys, all_values, terms)

    @property
    def _rope_length(self) -> int:
        """Bounds the positions that RoPE is asked for."""
        return self._max_position or self.slots.num_slots + 1


def _rotated_and_scaled(query: Tensor, factors: QueryFactors | None, terms: Terms) -> Tensor:
    """Queries as scores take them. [..., T, D]."""
    return query * terms.scaling if factors is None else rotate(query, factors.scaled(terms.scaling))
