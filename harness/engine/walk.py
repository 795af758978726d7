"""The walk: a block of tokens through the cache of every layer.

What happens to a token. `Walk.begin` looks at a block once and returns its plan (`planner.py`). The model then calls `attend` in
every layer, which follows the plan, and `end` is called after the last layer. By the definition (`PlainWalk`, in `plain.py`), a
layer takes the tokens of its block one after the other:

1. the token's rank and position are entered for the free slot, and its key and its value are written there: the key unrotated,
   or rotated where its angle never changes and nobody compares keys;
2. its query attends to all tokens held, itself included, whose keys are rotated to where the position mode puts them;
3. the attention updates the policy's statistics;
4. once the cache is full, the token worth least gives up its slot, which is free for the next token.

What a layer keeps depends on that layer's attention alone, so a whole block can pass one layer before it enters the next. The
other plans compute the same faster. `Step`, for a block of one token, does 3 and 4 for all layers at once, in `end`. `Fill`
attends in one go while nothing has to be evicted. `Closed` computes banded attention where it is known beforehand what is kept.
`Runs` attends in one go from one eviction to the next. `CompiledWalk` leaves the loop over tokens to a kernel.

Axis letters: L layers, B streams, H KV heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, D key dim,
Dv value dim, P pairs of dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, causal
from kvbench.harness.engine.closed_form import closed_form
from kvbench.harness.engine.kernels.choose import Kernels, kernels_for
from kvbench.harness.engine.method import EAGER, RAN, Method
from kvbench.harness.engine.placement import Placement
from kvbench.harness.engine.plain import Plain, rotated_and_scaled
from kvbench.harness.engine.plan import Block, Closed, CompiledWalk, Fill, PlainWalk, Plan, Runs, Step
from kvbench.harness.engine.planner import Planner
from kvbench.harness.engine.rotary import rotate
from kvbench.harness.engine.rows import Held, Rows, writes
from kvbench.harness.engine.runs import Run, RunReader
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode, Statistic


class Walk:
    """Drives blocks through the layers of one `Slots`."""

    def __init__(
        self, slots: Slots, positions: PositionMode, limit: int, method: Method = EAGER, like: Walk | None = None
    ) -> None:
        """Set up for a decoder's life.

        Args:
            slots: of the layers.
            positions: where RoPE puts a cached token.
            limit: the largest distance of mode `clamped`, in tokens.
            method: shortcuts that may be taken.
            like: a walk over other streams of such slots, whose kernels serve these too.
        """
        self.slots, self.rotation, self._method = slots, slots.shape.rotation, method
        self._placement = Placement(slots, positions, limit)
        self._form, self._kernels = None, Kernels()
        if like is not None:
            self._form, self._kernels = like._form, like._kernels
        else:
            if method.closed_form:
                self._form = closed_form(slots, positions, limit, self._placement.length, method.flex)
            if slots.shape.readers > 1:
                self._kernels = Kernels(plain_because="no kernel serves layers that share K and V")
            elif method.walk_kernel or method.step_kernel:
                self._kernels = kernels_for(slots, positions, limit, self._placement.max_position, method.walk_graphs)
        self._planner = Planner(slots, self._placement, self._form, self._kernels, method)
        self._plain = Plain(slots, self._placement)
        self._writes = any(writes(s) for s in slots.tensors.states)

    @property
    def has_closed_form(self) -> bool:
        """Whether blocks may be computed without walking them."""
        return self._form is not None

    @property
    def may_flex(self) -> bool:
        """Whether blocks of whole tiles may be computed by FlexAttention."""
        return self._form is not None and self._form.may_flex(self.slots.shape, self.slots.tensors.keys.dtype, self.slots.device)

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are walked by a compiled loop."""
        return self._method.walk_kernel and self._kernels.walk is not None and self._form is None

    @property
    def walks_in_graphs(self) -> bool:
        """Whether the launches of a compiled loop may be replayed as CUDA graphs."""
        return self.is_compiled and self._kernels.walk is not None and self._kernels.walk.in_graphs

    @property
    def steps_by_kernel(self) -> bool:
        """Whether single tokens are taken in by a compiled kernel."""
        return self._method.step_kernel and self._kernels.step is not None and self.slots.sees <= {"weights"}

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
        return self._planner(block)

    def reads_at_once(self, block: Block) -> bool:
        """Whether a block can pass one layer before it enters the next; otherwise it must come token by token."""
        return self._planner.reads_at_once(block)

    def attend(self, plan: Plan, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, place: int = 0) -> Tensor:
        """Take a block into one layer, each token seeing what is kept when it comes.

        Args:
            plan: of the block.
            layer: the cache's index in the model.
            query: unrotated. [B, H * G, T, D]; G of this layer alone.
            keys: unrotated. [B, H, T, D].
            values: [B, H, T, Dv].
            terms: of this layer's attention.
            place: of the layer among those that read this cache. The first one writes, the others find the block there.

        Returns:
            [B, H * G, T, Dv].
        """
        if isinstance(plan, Step) and plan.kernel is not None:
            rows, seen = self.slots.rows(plan.attended, layer), plan.seen_of_layer[self.slots.layers.index(layer)]
            free = rows.free.clone() if self._writes else rows.free
            RAN["step kernel"] += 1
            out = plan.kernel(self.slots, rows, query, keys, values, terms.scaling, seen.get("weights"))
            if self._writes:
                keys = keys if self.rotation is None else self.rotation.pair(keys)
                self._plain.note_written(rows, plan.places, 0, free, keys.flatten(0, 1), values.flatten(0, 1))
            return out
        paired_later = isinstance(plan, Closed) or (isinstance(plan, CompiledWalk) and plan.kernel.rotates)
        if self.rotation is not None and not paired_later:
            query, keys = self.rotation.pair(query), self.rotation.pair(keys)
        if isinstance(plan, Step):
            return self._plain.step(plan, layer, query, keys, values, terms, place)
        query = query.unflatten(1, (self.slots.shape.heads, self.slots.shape.group_of_reader))
        match plan:
            case Fill():
                out = self._fill(plan, layer, query, keys, values, terms, place)
            case Closed():
                rows = self.slots.rows(self.slots.num_slots, layer)
                held = plan.held[layer] if place else rows.oldest_first(min(plan.seen, self.slots.capacity or 0), plan.ordered)
                if place == 0 and self.slots.shape.readers > 1:  # these may be views of slots that change now
                    plan.held[layer] = held = Held(held.keys.clone(), held.values.clone(), held.position.clone(), [])
                out = plan.form(rows, query, keys, values, terms, held, plan.seen)
            case CompiledWalk():
                if not plan.kernel.rotates:
                    query = rotated_and_scaled(query, plan.query_factors, terms)
                RAN["compiled walk"] += 1
                rows, written = self.slots.rows(plan.attended, layer), self._written(plan, layer, keys, values)
                out = plan.kernel(self.slots, rows, layer, query, keys, values, terms.scaling, plan.ordered, plan.seen, written)
            case Runs():
                out = self._read_runs(plan, layer, query, keys, values, terms)
            case PlainWalk():
                out = self._plain.walk(plan, layer, query, keys, values, terms)
        return out.flatten(1, 2)

    def _written(self, plan: CompiledWalk, layer: int, keys: Tensor, values: Tensor) -> dict[Statistic, Tensor]:
        """What statistics compute of a block's tokens before a kernel walks it. [N, T, *k] each."""
        if not self._writes:
            return {}
        if plan.kernel.rotates and self.rotation is not None:
            keys = self.rotation.pair(keys)
        rows = self.slots.rows(plan.attended, layer)
        steps, ids = rows.of_streams(plan.block.steps), rows.of_streams(plan.block.ids)
        return rows.written(keys.flatten(0, 1), values.flatten(0, 1), steps, ids)

    def end(self, plan: Plan, block: Block) -> None:
        """After the last layer: note the order of the slots, and do the bookkeeping of a step for all layers at once."""
        self._planner.note_end(plan, block)
        if isinstance(plan, Step):
            self._finish(plan)

    def phase(self, seen: int) -> tuple[int, bool]:
        """All that the host decides about the step after `seen` tokens: slots attended, and whether tokens are evicted."""
        return self.slots.attended(self.slots.used(seen + 1)), self.slots.cadence.evicts(seen + 1)

    def forget_placement(self) -> None:
        """Make the next step compute all that it reads, as a captured one must."""
        self._planner.steady = None

    def note_replay(self, seen: int) -> None:
        """Note what an eager step after `seen` tokens would have noted."""
        self._planner.steady = None
        self._planner.ordered = self._planner.ordered and self._planner.still_filling(seen + 1)

    def fork(self, streams: Tensor) -> Walk:
        """A walk over copies of these streams. streams: [B'] int64."""
        other = Walk(self.slots.fork(streams), self._placement.mode, self._placement.limit, self._method, like=self)
        other._planner.ordered = self._planner.ordered
        return other

    def _fill(self, plan: Fill, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms, place: int) -> Tensor:
        """A block that all fits: causal attention in one go. -> [B, H, G, T, Dv]."""
        end, streams = plan.seen + keys.shape[2], query.shape[0]
        rows = self.slots.rows(self.slots.num_slots, layer)
        factors = None
        if self.rotation is not None:
            factors = self.rotation.factors(torch.arange(end, device=keys.device), keys.dtype, end)
            query = rotate(query, factors[plan.seen :])
        if place == 0:
            self._enter(plan, rows, keys, values, factors)
        all_keys, all_values = (x[:, :end].unflatten(0, (streams, -1)) for x in (rows.keys, rows.values))
        if factors is not None and not rows.keys_rotated:
            all_keys = rotate(all_keys, factors)
        return causal(query, all_keys, all_values, terms)

    def _enter(self, plan: Fill, rows: Rows, keys: Tensor, values: Tensor, factors: Tensor | None) -> None:
        """Write a block that all fits. keys: paired; factors: RoPE of all positions up to its end, None without RoPE."""
        first, end = plan.seen, plan.seen + keys.shape[2]
        kept = rotate(keys, factors[first:]) if factors is not None and rows.keys_rotated else keys
        rows.keys[:, first:end], rows.values[:, first:end] = kept.flatten(0, 1), values.flatten(0, 1)
        rows.rank[:, first:end] = rows.position[:, first:end] = torch.arange(first, end, device=keys.device)
        if self._writes:
            free, steps = rows.free[:, None] + torch.arange(end - first, device=keys.device), rows.position[:, first:end]
            rows.note_written(free, keys.flatten(0, 1), values.flatten(0, 1), steps, rows.of_streams(plan.ids))
        rows.free += keys.shape[2]

    def _read_runs(self, plan: Runs, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Runs without evictions, one after the other. -> [B, H, G, T, Dv]."""
        rows, places = self.slots.rows(plan.attended, layer), plan.places
        steps = torch.stack(list(places.steps), 1)
        ids = torch.stack(list(places.ids), 1) if places.ids else steps
        read = RunReader(rows, terms, self._placement.mode, self.rotation, plan.updates)
        by_head, out, first = query.shape[:2], [], 0
        query, keys, values = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        for number, length in enumerate(plan.lengths):
            at = slice(first, first + length)
            run = Run(query[..., at, :], keys[:, at], values[:, at], steps[:, at], ids[:, at])
            due = number < len(plan.lengths) - 1 or plan.evicts_at_end
            out.append(read(run, places.now[first : first + length], due))
            first += length
        return torch.cat(out, 2).unflatten(0, by_head)

    def _finish(self, plan: Step) -> None:
        """Update the statistics with a step's attention, and find the slots of the next token."""
        places, kernel = plan.places, self._kernels.release if self._method.step_kernel else None
        if kernel is not None and places.valid[0] is None and not places.ragged:
            kernel(self.slots, plan.rows, plan.seen.get("weights"), places.steps[0], places.evicts[0])
            return
        if plan.seen:
            plan.rows.update(plan.seen, places.valid[0])
        plan.rows.release(places.valid[0], places.evicts[0], places.ragged)
