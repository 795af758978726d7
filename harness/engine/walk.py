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

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, causal, weights
from kvbench.harness.engine.closed_form import closed_form
from kvbench.harness.engine.kernels.choose import Kernels, kernels_for
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.plan import Block, Closed, CompiledWalk, Fill, Places, PlainWalk, Plan, QueryFactors, Runs, Step
from kvbench.harness.engine.rotary import LONGEST_STREAM, Rotation, rotate
from kvbench.harness.engine.rows import Rows, writes
from kvbench.harness.engine.runs import Run, RunReader, logits_of
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode, Seen

_MIN_COMPILED_TOKENS = 4  # shorter blocks don't repay the kernel's copies
_MAX_BATCHED_ROPE_ELEMENTS = 2**20  # of the keys of all layers; above this, each layer computes its own RoPE


class _Steady(NamedTuple):
    """Where a step's token goes in a full cache."""

    rank: Tensor  # [R] int64
    factors: list[QueryFactors | None]  # RoPE of its queries, by layer


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
        self._steady: _Steady | None = None  # of the step before, where those of the next one are the same
        self._writes = any(writes(s) for s in slots.tensors.states)

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
            rows, seen = self.slots.rows(plan.attended, layer), plan.seen_of_layer[self.slots.layers.index(layer)]
            free = rows.free.clone() if self._writes else rows.free
            out = plan.kernel(self.slots, rows, query, keys, values, terms.scaling, seen.get("weights"))
            if self._writes:
                keys = keys if self.rotation is None else self.rotation.pair(keys)
                self._note_written(rows, plan.places, 0, free, keys.flatten(0, 1), values.flatten(0, 1))
            return out
        paired_later = isinstance(plan, Closed) or (isinstance(plan, CompiledWalk) and plan.kernel.rotates)
        if self.rotation is not None and not paired_later:
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
                if not plan.kernel.rotates:
                    query = _rotated_and_scaled(query, plan.query_factors, terms)
                rows = self.slots.rows(plan.attended, layer)
                out = plan.kernel(self.slots, rows, layer, query, keys, values, terms.scaling, plan.ordered, plan.seen)
            case Runs():
                out = self._read_runs(plan, layer, query, keys, values, terms)
            case PlainWalk():
                out = self._walk(plan, layer, query, keys, values, terms)
        return out.flatten(1, 2)

    def end(self, plan: Plan, block: Block) -> None:
        """After the last layer: note the order of the slots, and do the bookkeeping of a step for all layers at once."""
        evicted = not self._still_filling(block.end)
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
        slots = self.slots
        return slots.version, slots.attended(slots.used(seen + 1)), slots.cadence.evicts(seen + 1)

    def forget_placement(self) -> None:
        """Make the next step compute all that it reads, as a captured one must."""
        self._steady = None

    def note_replay(self, seen: int) -> None:
        """Note what an eager step after `seen` tokens would have noted."""
        self._steady = None
        self._ordered = self._ordered and self._still_filling(seen + 1)

    def fork(self, streams: Tensor) -> Walk:
        """A walk over copies of these streams. streams: [B'] int64."""
        other = copy(self)
        other.slots, other._steady = self.slots.fork(streams), None
        return other

    def _still_filling(self, seen: int | None) -> bool:
        """Whether no token has been evicted after `seen` tokens; None: the host does not know."""
        return self.slots.capacity is None or (seen is not None and seen <= self.slots.capacity)

    def _plan_of_many(self, block: Block) -> Plan:
        """How a block of several tokens is read."""
        slots, seen = self.slots, block.seen
        if self._can_fill(block):
            return Fill(seen or 0, block.ids)
        if seen is not None and self._closed_form is not None and self._closed_form.takes(block.tokens, seen):
            return Closed(self._closed_form, seen, self._ordered)
        attended = slots.attended(None if block.end is None else slots.used(block.end))
        rows = slots.rows(attended, slots.layers[0])  # places are the same in every layer
        compiled = self._method.walk_kernel and block.tokens >= _MIN_COMPILED_TOKENS and seen is not None
        kernel = self._kernels.walk if compiled else None
        if kernel is not None:
            factors = None if kernel.rotates else self._query_factors(self._ranks(block), block)
            return CompiledWalk(kernel, factors, attended, seen or 0, self._ordered)
        places = self._places(block, rows)
        lengths = self._runs(block)
        if lengths is not None and seen is not None:
            updates = bool(slots.sees) and seen + block.tokens > slots.quiet
            return Runs(lengths, slots.cadence.evicts(seen + block.tokens), places, attended, updates)
        return PlainWalk(places, attended)

    def _runs(self, block: Block) -> list[int] | None:
        """The runs that a block may be read in; None if it has to be walked token by token."""
        if block.seen is None or not self._method.fill or (self._mode == "clamped" and (block.end or 0) > self._limit):
            return None
        lengths = self.slots.cadence.runs(block.seen, block.tokens)
        return lengths if len(lengths) == 1 or self.slots.every > 1 else None

    def _plan_of_one(self, block: Block) -> Step:
        """How a single token is read; its rank and position are entered here, for all layers at once."""
        slots = self.slots
        kernel = self._kernels.step if self._method.step_kernel and slots.sees <= {"weights"} else None
        attended = slots.attended(None if block.end is None else slots.used(block.end))
        rows = slots.rows(attended)
        places = self._places(block, rows)
        rank = rows.count() if places.ranks[0] is None else places.ranks[0]
        if slots.uneven and block.valid is not None:
            rank = rank.masked_fill(~rows.of_streams(block.valid)[:, 0], slots.empty_rank)
        rows.place(rank, places.steps[0], places.now[0])
        layers, size = len(slots.layers), (len(rows.rank), slots.shape.group)
        last = {"weights": attended, "logits": attended, "queries": slots.shape.key_dim, "outputs": slots.shape.value_dim}
        wide, narrow = slots.wide, slots.tensors.keys.dtype
        seen: dict[Seen, Tensor] = {
            name: rows.keys.new_empty(*size, last[name], dtype=wide if last[name] == attended else narrow) for name in slots.sees
        }
        by_layer = {name: x.unflatten(0, (layers, -1)).unbind(0) for name, x in seen.items()}
        seen_of_layer = [{name: parts[at] for name, parts in by_layer.items()} for at in range(layers)]
        if kernel is not None:
            return Step(places, rows, attended, seen, seen_of_layer, kernel)
        nothing = [None] * layers
        used = nothing if places.evicts[0] and slots.evicts_each_step else rows.used().unflatten(0, (layers, -1)).unbind(0)
        key_factors = nothing
        if self.rotation is not None and rows.keys.numel() <= _MAX_BATCHED_ROPE_ELEMENTS:
            key_factors = self._key_factors(rows, self.rotation, places.steps[0]).unflatten(0, (layers, -1)).unbind(0)
        return Step(places, rows, attended, seen, seen_of_layer, None, self._step_factors(block, rank), used, key_factors)

    def _step_factors(self, block: Block, rank: Tensor) -> list[QueryFactors | None]:
        """RoPE of a step's queries, by layer. rank: of the token in all rows, [R] int64."""
        slots, layers = self.slots, len(self.slots.layers)
        if self.rotation is None:
            return [None] * layers
        if self._steady is not None and block.seen is not None:
            return self._steady.factors
        rows = slots.rows(slots.num_slots, slots.layers[0])
        if slots.uneven and self._mode == "cache":
            at = rank.clamp(max=slots.num_slots).view(layers, -1)
            return [self._factors(x[:, None]) for x in at]
        ranks = self._ranks(block)
        factors = self._factors(rows.of_streams(self._query_places(ranks, block)))
        # Once the cache is full, the rank of the newest token stays the same, and so does the place of its query.
        if self._mode != "stream" and slots.evicts_each_step and block.end is not None and slots.cadence.evicts(block.end):
            self._steady = _Steady(rank, [factors] * layers)
        return [factors] * layers

    def _can_fill(self, block: Block) -> bool:
        """Whether nothing that the block's tokens do depends on the walk: no eviction, no updates, true distances."""
        slots = self.slots
        if block.end is None or not self._method.fill or slots.cadence.dropped or (slots.sees and block.end > slots.quiet):
            return False
        return (slots.capacity is None or block.end <= slots.capacity) and (self._mode != "clamped" or block.end <= self._limit)

    def _ranks(self, block: Block) -> Tensor:
        """Ranks of the new tokens, in heads that all hold as many. [B, T] int64."""
        return self.slots.cadence.held_of(block.steps)

    def _query_places(self, ranks: Tensor, block: Block) -> Tensor:
        """Where RoPE puts the block's queries. [B, T] int64."""
        return {"cache": ranks, "stream": block.steps, "clamped": torch.full_like(ranks, self._limit)}[self._mode]

    def _factors(self, at: Tensor) -> QueryFactors:
        """RoPE at these places. [...] int64 -> [..., P]."""
        assert self.rotation is not None
        return QueryFactors(self.rotation.factors(at, self.slots.tensors.keys.dtype, self._rope_length))

    def _query_factors(self, ranks: Tensor, block: Block) -> QueryFactors | None:
        """RoPE of a block's queries; None without RoPE. [B, 1, 1, T, P]."""
        return None if self.rotation is None else self._factors(self._query_places(ranks, block)[:, None, None])

    def _places(self, block: Block, rows: Rows) -> Places:
        """Where the tokens go in these rows."""
        slots, seen, steady = self.slots, block.seen, self._steady
        ranks: Sequence[Tensor | None] = [None] * block.tokens
        if steady is not None and seen is not None and block.tokens == 1:
            ranks = [steady.rank]
        elif not slots.uneven:
            even = self._ranks(block)
            if block.valid is not None:  # an invalid token is written, but to a slot that stays empty
                even = even.masked_fill(~block.valid, slots.empty_rank)
            ranks = rows.each_head(even)
        return Places(
            ranks=ranks,
            steps=rows.each_head(block.steps),
            now=rows.each_stream(block.steps),
            valid=[None] * block.tokens if block.valid is None else rows.each_stream(block.valid),
            evicts=[seen is not None and slots.cadence.evicts(seen + t + 1) for t in range(block.tokens)],
            ragged=seen is None,
            ids=rows.each_head(block.ids) if self._writes else (),
        )

    def _read_runs(self, plan: Runs, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Runs without evictions, one after the other. -> [B, H, G, T, Dv]."""
        rows, places = self.slots.rows(plan.attended, layer), plan.places
        steps = torch.stack(list(places.steps), 1)
        ids = torch.stack(list(places.ids), 1) if places.ids else steps
        read = RunReader(rows, terms, self._mode, self.rotation, plan.updates)
        by_head, out, first = query.shape[:2], [], 0
        query, keys, values = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        for number, length in enumerate(plan.lengths):
            at = slice(first, first + length)
            run = Run(query[..., at, :], keys[:, at], values[:, at], steps[:, at], ids[:, at])
            due = number < len(plan.lengths) - 1 or plan.evicts_at_end
            out.append(read(run, places.now[first : first + length], due))
            first += length
        return torch.cat(out, 2).unflatten(0, by_head)

    def _walk(self, plan: PlainWalk, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """The definition, token by token inside one layer. -> [B, H, G, T, Dv]."""
        streams, heads = query.shape[:2]
        places, rows = plan.places, self.slots.rows(plan.attended, layer)
        parts = [x.movedim(-2, 0).flatten(1, 2).contiguous().unbind(0) for x in (query, keys, values)]
        out = values.new_empty(values.shape[2], *parts[0][0].shape[:2], values.shape[3])  # one tensor: many small ones are slow
        for t, (q, k, v) in enumerate(zip(*parts, strict=True)):
            rank, step, valid = places.ranks[t], places.steps[t], places.valid[t]
            if rank is None:
                rank = rows.count()
                if valid is not None:
                    rank = rank.masked_fill(~valid.expand(-1, heads, 1).flatten(), self.slots.empty_rank)
            rows.place(rank, step, places.now[t])
            rows.write(k, v)
            if self._writes:
                self._note_written(rows, places, t, rows.free, k[:, None], v[:, None])
            full = places.evicts[t] and self.slots.evicts_each_step
            seen = self._attend_one(
                rows,
                q,
                terms,
                None if full else rows.used(),
                self._key_factors_of(rows, step),
                self._own_factors(rank, step),
                out[t],
            )
            if seen:
                rows.update(seen, valid)
            rows.release(valid, places.evicts[t], places.ragged)
        return out.unflatten(1, (streams, heads)).movedim(0, 3)

    def _own_factors(self, rank: Tensor, step: Tensor) -> QueryFactors | None:
        """RoPE of one token's queries; None without RoPE. rank, step: [N] int64 -> [N, 1, P]."""
        if self.rotation is None:
            return None
        limit = torch.full_like(rank, self._limit)
        return self._factors(
            {"cache": rank.clamp(max=self.slots.num_slots), "stream": step, "clamped": limit}[self._mode][:, None]
        )

    def _note_written(self, rows: Rows, places: Places, t: int, free: Tensor, keys: Tensor, values: Tensor) -> None:
        """Tell statistics of a token that was written. free: [N] int64; keys, values: [N, 1, D]."""
        size, valid = len(rows.rank), places.valid[t]
        counted = None if valid is None else valid[: size // rows.heads].expand(-1, rows.heads, 1).flatten()[:, None]
        rows.note_written(free[:, None], keys, values, places.steps[t][:size, None], places.ids[t][:size, None], counted)

    def _step(self, plan: Step, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """One token in one layer, in plain PyTorch. [B, H * G, 1, D], [B, H, 1, D], [B, H, 1, Dv] -> [B, H * G, 1, Dv]."""
        at, rows = self.slots.layers.index(layer), self.slots.rows(plan.attended, layer)
        streams, size, group = query.shape[0], len(rows.keys), self.slots.shape.group
        query, keys, values = query.reshape(size, group, -1), keys.reshape(size, -1), values.reshape(size, -1)
        rows.write(keys, values)
        if self._writes:
            self._note_written(rows, plan.places, 0, rows.free, keys[:, None], values[:, None])
        factors = plan.key_factors[at]
        if factors is None:
            factors = self._key_factors_of(rows, plan.places.steps[0])
        out = values.new_empty(size, group, values.shape[-1])
        seen = self._attend_one(rows, query, terms, plan.used[at], factors, plan.query_factors[at], out)
        for name, x in plan.seen_of_layer[at].items():
            x.copy_(seen[name])
        return out.view(streams, -1, 1, self.slots.shape.value_dim)

    def _finish(self, plan: Step) -> None:
        """Update the statistics with a step's attention, and find the slots of the next token."""
        places, kernel = plan.places, self._kernels.release if self._method.step_kernel else None
        if kernel is not None and places.valid[0] is None and not places.ragged:
            kernel(self.slots, plan.rows, plan.seen.get("weights"), places.steps[0], places.evicts[0])
            return
        if plan.seen:
            plan.rows.update(plan.seen, places.valid[0])
        plan.rows.release(places.valid[0], places.evicts[0], places.ragged)

    def _attend_one(
        self,
        rows: Rows,
        query: Tensor,
        terms: Terms,
        used: Tensor | None,
        key_factors: Tensor | None,
        query_factors: QueryFactors | None,
        into: Tensor,
    ) -> dict[Seen, Tensor]:
        """One query a row over all that is held.

        Args:
            rows: of the layer.
            query: unrotated. [N, G, D].
            terms: of this layer's attention.
            used: slots that hold a token; all when None. [N, 1, S] bool.
            key_factors: RoPE of the cached keys; None without RoPE. [N, S, P].
            query_factors: RoPE of the query; None without RoPE. [N, 1, P].
            into: where to put the output. [N, G, Dv].

        Returns:
            What statistics read. [N, G, ...] each.
        """
        keys = rows.keys if key_factors is None else rotate(rows.keys, key_factors)
        scores = torch.bmm(_rotated_and_scaled(query, query_factors, terms), keys.transpose(1, 2))
        mass = weights(scores, terms, self.slots.shape.heads, used)
        torch.bmm(mass.to(rows.values.dtype), rows.values, out=into)
        seen: dict[Seen, Tensor] = {"weights": mass, "queries": query, "outputs": into}
        if "logits" in rows.asked:
            logits = logits_of(scores, terms)
            seen["logits"] = logits if used is None else logits.masked_fill(~used, -torch.inf)
        return {name: seen[name] for name in rows.asked}

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
        if self._writes:
            free, steps = rows.free[:, None] + torch.arange(end - first, device=keys.device), rows.position[:, first:end]
            rows.note_written(free, keys.flatten(0, 1), values.flatten(0, 1), steps, rows.of_streams(plan.ids))
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
