"""The walk: read tokens into the cache of every layer.

`begin` plans a block once, before the first layer. The model then calls `attend` in every layer, and `end` finishes the block
after the last layer. By definition, a layer processes the tokens of a block one after another:

1. write: enter the token's rank and position for the free slot, and store its key and value there. The key is stored unrotated,
   or rotated if its angle never changes and the policy does not read keys;
2. attend: the token's query sees all tokens held, its own included. RoPE gives their keys the positions of the position mode;
3. update: update the policy's statistics with the attention;
4. evict: once the cache is full, free the slot of the least important token for the next token.

A block of one token (`Step`) does 1 in `begin` and `attend`, 2 in `attend`, and 3 and 4 in `end`, for all layers at once. The
tokens that a layer keeps depend on the attention of that layer alone, so a longer block can pass one layer before it enters the
next. `PlainWalk` does all four for each token inside a layer; `shortcuts.py` computes the same result faster.

Axis letters: L layers, B streams, H KV heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, D key dim,
Dv value dim, P pairs of dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, logits_of, weights
from kvbench.harness.engine.closed_form import ClosedForm, closed_form
from kvbench.harness.engine.held import writes
from kvbench.harness.engine.kernel_interface import Kernels, kernels_for
from kvbench.harness.engine.method import EAGER, RAN, Method
from kvbench.harness.engine.plan import Block, Closed, CompiledWalk, Fill, Places, PlainWalk, Plan, Runs, Step
from kvbench.harness.engine.rotary import Placement, QueryFactors, rotate
from kvbench.harness.engine.shortcuts import Shortcuts
from kvbench.harness.engine.slot_rows import Rows, Windows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode, Seen

_MAX_BATCHED_ROPE_ELEMENTS = 2**20  # in the keys of all layers; with more elements, each layer computes its own RoPE


class Walk:
    """Reads blocks into the layers of one `Slots`.

    Attributes:
        rotation: RoPE of the layers; None without RoPE.
        ordered: the slots hold their tokens oldest first.
        steady: rank in all rows, [R] int64, and RoPE of the query, for reuse by the next token; None if both must be computed.
    """

    def __init__(
        self, slots: Slots, positions: PositionMode, limit: int, method: Method = EAGER, like: Walk | None = None
    ) -> None:
        """Choose kernels and shortcuts for the lifetime of a decoder.

        Args:
            positions: position that RoPE gives to a cached token.
            limit: maximum distance with positions `clamped`, in tokens.
            method: shortcuts that may be taken.
            like: walk whose kernels and closed form are reused. Its slots differ from `slots` only in their streams.
        """
        self.slots, self.rows, self.rotation, self._method = slots, Windows(slots), slots.shape.rotation, method
        self._placement = Placement(self.rotation, positions, limit, slots.dtype, slots.keys_rotated)
        form: ClosedForm | None = None
        kernels = Kernels()
        if like is not None:
            form, kernels = like._shortcuts.form, like._kernels
        else:
            if method.closed_form:
                form = closed_form(slots, positions, limit, self._placement.max_position or slots.num_slots + 1, method.flex)
            if method.walk_kernel or method.walk_steps or method.step_kernel:
                kernels = kernels_for(slots, positions, limit, self._placement.max_position, method.walk_graphs)
        self._kernels: Kernels = kernels
        self._shortcuts: Shortcuts = Shortcuts(slots, self.rows, self._placement, form, kernels, method)
        self._group, self._writes = slots.shape.group, any(writes(s) for s in slots.tensors.states)
        self.ordered = True
        self.steady: tuple[Tensor, QueryFactors] | None = None

    def begin(self, block: Block) -> Plan:
        """Plan a block before the first layer: choose the method, and compute the values that all layers share."""
        if block.steps.shape[1] == 1:
            return self._begin_step(block)
        self.steady = None
        plan = self._shortcuts.plan(block, self.ordered)
        if plan is not None:
            return plan
        attended = self.slots.attended(block.end, block.tokens)
        places = self._places(block, self.rows(attended, self.slots.layers[0]))  # the same in every layer
        lengths = self._shortcuts.runs(block)
        if lengths is None:
            kernel = self._shortcuts.step_kernel(block)
            return PlainWalk(places, self._query_factors(places) if kernel is None else (), attended, kernel)
        updates = bool(self.slots.sees) and (block.end or 0) > self.slots.quiet
        return Runs(lengths, places, attended, updates)

    def _places(self, block: Block, rows: Rows) -> Places:
        """Return the places of a block's tokens in these rows."""
        slots, tokens_before, count = self.slots, block.tokens_before, block.steps.shape[1]
        steps, head, stream = block.steps.T, rows.stream_of_row, rows.stream_of_block
        ranks: list[Tensor | None] = [None] * count
        if self.steady is not None and tokens_before is not None:
            ranks = [self.steady[0]]
        elif not slots.uneven:
            even = slots.cadence.held_of(steps)
            if block.valid is not None:  # an invalid token is written, but to a slot that stays empty
                even = even.masked_fill(~block.valid.T, slots.empty_rank)
            ranks = list(even.index_select(1, head).unbind(0))
        valid = None if block.valid is None else block.valid.T.index_select(1, stream)[..., None, None]
        return Places(
            ranks=ranks,
            steps=steps.index_select(1, head).unbind(0),
            now=steps.index_select(1, stream)[..., None, None].unbind(0),
            valid=[None] * count if valid is None else valid.unbind(0),
            evicts=[tokens_before is not None and slots.cadence.evicts(tokens_before + t) for t in range(1, count + 1)],
            ragged=tokens_before is None,
            ids=block.ids.T.index_select(1, head).unbind(0) if self._writes else (),
        )

    def _query_factors(self, places: Places) -> Sequence[QueryFactors | None]:
        """Return RoPE of each token's query; None without RoPE or if the host does not know ranks. [N, 1, P] each."""
        known = [rank for rank in places.ranks if rank is not None]
        of_block = None
        if known:
            ranks, steps = torch.stack(known)[..., None], torch.stack(list(places.steps))[..., None]
            of_block = self._placement.of_queries(ranks.clamp(max=self.slots.num_slots), steps, self.slots.num_slots)
        return [None] * len(places.ranks) if of_block is None else [QueryFactors(x) for x in of_block.factors.unbind(0)]

    def _begin_step(self, block: Block) -> Step:
        """Enter a token's rank and position for the free slot of every row, and compute RoPE of its query and the keys held."""
        slots, placement = self.slots, self._placement
        attended = slots.attended(None if block.tokens_before is None else block.tokens_before + 1)
        rows, layers = self.rows(attended), len(slots.layers)
        places = self._places(block, rows)
        rank, step, evicts = places.ranks[0], places.steps[0], places.evicts[0]
        if rank is None:
            rank = rows.count()
            if block.valid is not None:
                rank = rank.masked_fill(~block.valid[:, 0].index_select(0, rows.stream_of_row), slots.empty_rank)
        rows.place(rank, step, places.now[0])
        observed = rows.observation_buffers()
        by_layer = {name: x.unflatten(0, (layers, -1)).unbind(0) for name, x in observed.items()}
        observed_of_layer = [{name: parts[index] for name, parts in by_layer.items()} for index in range(layers)]
        if self._method.step_kernel and self._kernels.step is not None and slots.sees <= {"weights"}:
            return Step(places, rows, attended, observed, observed_of_layer, self._kernels.step)
        nothing = [None] * layers
        all_used = evicts and slots.evicts_each_step
        used = nothing if all_used else rows.used().unflatten(0, (layers, -1)).unbind(0)
        if self.rotation is None:
            return Step(places, rows, attended, observed, observed_of_layer, None, nothing, used, nothing)
        of_rows = None
        if rows.rank.numel() * slots.shape.key_dim <= _MAX_BATCHED_ROPE_ELEMENTS:
            account = (rows.rank, rows.position, step) if slots.tensors.pages is None else rows.account(step)
            of_rows = placement.of_keys(*account, slots.num_slots)
        key_factors = nothing if of_rows is None else of_rows.unflatten(0, (layers, -1)).unbind(0)
        if self.steady is not None and block.tokens_before is not None:
            query_factors: list[QueryFactors | None] = [self.steady[1]] * layers
        elif slots.uneven:
            ranks, steps = rank.clamp(max=slots.num_slots).view(layers, -1, 1), step.view(layers, -1, 1)
            query_factors = [placement.of_queries(ranks[index], steps[index], slots.num_slots) for index in range(layers)]
        else:  # alike in every layer
            size = len(rank) // layers
            own = placement.of_queries(rank[:size, None].clamp(max=slots.num_slots), step[:size, None], slots.num_slots)
            query_factors = [own] * layers
            # Once the cache is full, the newest token always has the same rank, and RoPE of its query stays the same.
            if evicts and slots.evicts_each_step and placement.mode != "stream" and own is not None:
                self.steady = rank, own
        return Step(places, rows, attended, observed, observed_of_layer, None, query_factors, used, key_factors)

    def attend(self, plan: Plan, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Read a block into one layer. Each token sees the tokens that are kept at its step.

        Args:
            layer: index of the layer in the model.
            query: unrotated. [B, H * G, T, D].
            keys: unrotated. [B, H, T, D].
            values: [B, H, T, Dv].

        Returns:
            [B, H * G, T, Dv].
        """
        match plan:
            case Step(kernel=None):
                return self._step(plan, layer, query, keys, values, terms)
            case Step():
                return self._step_by_kernel(plan, layer, query, keys, values, terms)
            case PlainWalk(kernel=None):
                return self._walk(plan, layer, query, keys, values, terms)
            case PlainWalk():
                return self._shortcuts.walk_by_steps(plan, layer, query, keys, values, terms)
            case Runs():
                return self._shortcuts.read_runs(plan, layer, query, keys, values, terms)
            case Fill():
                return self._shortcuts.fill(plan, layer, query, keys, values, terms)
            case Closed():
                return self._shortcuts.attend_in_band(plan, layer, query, keys, values, terms)
            case CompiledWalk():
                return self._shortcuts.walk_by_kernel(plan, layer, query, keys, values, terms)

    def _step(self, plan: Step, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Write one token in one layer, and attend."""
        index, rows, group = self.slots.layers.index(layer), self.rows(plan.attended, layer), self._group
        if self.rotation is not None:
            query, keys = self.rotation.pair(query), self.rotation.pair(keys)
        streams, size, step, own = query.shape[0], len(rows.rank), plan.places.steps[0], plan.query_factors[index]
        query, keys, values = query.reshape(size, group, -1), keys.reshape(size, -1), values.reshape(size, -1)
        rows.write(rotate(keys, own.factors[:, 0]) if own is not None and rows.keys_rotated else keys, values)
        if self._writes:
            self._note_written(rows, plan.places, 0, rows.free, keys[:, None], values[:, None])
        factors = plan.key_factors[index]
        if factors is None and self.rotation is not None:
            factors = self._placement.of_keys(*rows.account(step), self.slots.num_slots)
        out = values.new_empty(size, group, values.shape[-1])
        observed = self._attend_one(rows, query, terms, plan.used[index], factors, own, out)
        for name, x in plan.observed_of_layer[index].items():
            x.copy_(observed[name])
        return out.view(streams, -1, 1, out.shape[-1])

    def _step_by_kernel(self, plan: Step, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Write one token in one layer, and attend, by a compiled kernel."""
        assert plan.kernel is not None
        rows, observed = self.rows(plan.attended, layer), plan.observed_of_layer[self.slots.layers.index(layer)]
        free = rows.free.clone() if self._writes else rows.free
        RAN["step kernel"] += 1
        out = plan.kernel(self.slots, rows, query, keys, values, terms.scaling, observed.get("weights"))
        if self._writes:
            keys = keys if self.rotation is None else self.rotation.pair(keys)
            self._note_written(rows, plan.places, 0, free, keys.flatten(0, 1), values.flatten(0, 1))
        return out

    def _walk(self, plan: PlainWalk, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Walk a block token by token inside one layer: write, attend, update, evict."""
        if self.rotation is not None:
            query, keys = self.rotation.pair(query), self.rotation.pair(keys)
        slots, places, rows = self.slots, plan.places, self.rows(plan.attended, layer)
        streams, heads, tokens = keys.shape[:3]
        parts = query.unflatten(1, (heads, -1)), keys, values
        by_token = [x.movedim(-2, 0).flatten(1, 2).contiguous().unbind(0) for x in parts]
        out = values.new_empty(tokens, streams * heads, self._group, values.shape[3])  # one tensor: many small ones are slow
        for t, (q, k, v) in enumerate(zip(*by_token, strict=True)):
            rank, step, valid, own = places.ranks[t], places.steps[t], places.valid[t], plan.query_factors[t]
            if rank is None:
                rank = rows.count()
                if valid is not None:
                    rank = rank.masked_fill(~valid.expand(-1, heads, 1).flatten(), slots.empty_rank)
                own = self._placement.of_queries(rank[:, None].clamp(max=slots.num_slots), step[:, None], slots.num_slots)
            rows.place(rank, step, places.now[t])
            rows.write(rotate(k, own.factors[:, 0]) if own is not None and rows.keys_rotated else k, v)
            if self._writes:
                self._note_written(rows, places, t, rows.free, k[:, None], v[:, None])
            used = None if places.evicts[t] and slots.evicts_each_step else rows.used()
            factors = self._placement.of_keys(*rows.account(step), slots.num_slots)
            observed = self._attend_one(rows, q, terms, used, factors, own, out[t])
            if observed:
                rows.update(observed, valid)
            rows.release(valid, places.evicts[t], places.ragged)
        return out.unflatten(1, (streams, heads)).movedim(0, 3).flatten(1, 2)

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
        """Attend with one query per row over all cached tokens.

        Args:
            query: unrotated. [N, G, D].
            used: slots that hold a token; all when None. [N, 1, S] bool.
            key_factors: RoPE that the stored keys still need; None if they need none. [N, S, P].
            query_factors: RoPE of the query; None without RoPE. [N, 1, P].
            into: receives the output. [N, G, Dv].

        Returns:
            Parts of attention that statistics read. [N, G, ...] each.
        """
        keys, values = rows.windows
        scaled = query * terms.scaling if query_factors is None else query_factors.rotated(query, terms.scaling)
        scores = keys.dots(scaled, key_factors)
        mass = weights(scores, terms, rows.heads, used)
        values.mix(mass, into)
        observed: dict[Seen, Tensor] = {"weights": mass, "queries": query, "outputs": into}
        if "logits" in rows.observed_names:
            logits = logits_of(scores, terms)
            observed["logits"] = logits if used is None else logits.masked_fill(~used, -torch.inf)
        return {name: observed[name] for name in rows.observed_names}

    def _note_written(self, rows: Rows, places: Places, t: int, free: Tensor, keys: Tensor, values: Tensor) -> None:
        """Set the first values of statistics for a written token. free: [N] int64; keys, values: [N, 1, D]."""
        size, valid = len(rows.rank), places.valid[t]
        counted = None if valid is None else valid[: size // rows.heads].expand(-1, rows.heads, 1).flatten()[:, None]
        rows.note_written(free[:, None], keys, values, places.steps[t][:size, None], places.ids[t][:size, None], counted)

    def end(self, plan: Plan, block: Block) -> None:
        """Finish a block after the last layer.

        Note the order of the slots. After a step, also update statistics and evict, in all layers at once.
        """
        if not isinstance(plan, Step):
            self.ordered = self._shortcuts.ordered_after(plan, self.ordered, block.end)
            return
        if self.ordered and self.slots.capacity is not None:
            self.ordered = block.tokens_before is not None and block.tokens_before < self.slots.capacity
        places, kernel = plan.places, self._kernels.release if self._method.step_kernel else None
        if kernel is not None and places.valid[0] is None and not places.ragged:
            if plan.observed and not kernel.updates:
                plan.rows.update(plan.observed, None)
            kernel(self.slots, plan.rows, plan.observed.get("weights"), places.steps[0], places.evicts[0])
            return
        if plan.observed:
            plan.rows.update(plan.observed, places.valid[0])
        plan.rows.release(places.valid[0], places.evicts[0], places.ragged)

    def phase(self, tokens_read: int) -> tuple[int, bool]:
        """Return the host's decisions about the next step: slots attended, and whether tokens are evicted."""
        return self.slots.attended(tokens_read + 1), self.slots.cadence.evicts(tokens_read + 1)

    def forget_placement(self) -> None:
        """Make the next step compute all of its inputs, as a captured step must."""
        self.steady = None

    def note_replay(self, tokens_read: int) -> None:
        """Update the walk's state as an eager step after `tokens_read` tokens would have."""
        self.steady = None
        self.ordered = self.ordered and (self.slots.capacity is None or tokens_read < self.slots.capacity)

    def clear(self) -> None:
        """Remove all tokens, from slots whose policy keeps no statistics."""
        tensors = self.slots.tensors
        assert not tensors.states
        tensors.rank.fill_(self.slots.empty_rank)
        tensors.position.fill_(-1)
        tensors.free.copy_(tensors.row_base)
        self.ordered, self.steady = True, None

    def fork(self, streams: Tensor) -> Walk:
        """Return a walk over copies of these streams. streams: [B'] int64."""
        other = Walk(self.slots.fork(streams), self._placement.mode, self._placement.limit, self._method, like=self)
        other.ordered = self.ordered
        return other

    @property
    def offers(self) -> frozenset[str]:
        """Names, as in `RAN`, of the shortcuts that may be taken."""
        form, walk, method = self._shortcuts.form, self._kernels.walk, self._method
        is_compiled = method.walk_kernel and walk is not None and form is None
        offered = {
            "closed form": form is not None,
            "FlexAttention": form is not None and form.may_flex,
            "compiled walk": is_compiled,
            "walk in graphs": is_compiled and walk is not None and walk.in_graphs,
            "compiled steps": self._shortcuts.walks_by_steps and form is None,
            "step kernel": method.step_kernel and self._kernels.step is not None and self.slots.sees <= {"weights"},
        }
        return frozenset(name for name, is_offered in offered.items() if is_offered)

    @property
    def state_bytes(self) -> int:
        """Bytes of everything besides K and V that is held between steps."""
        return self.slots.state_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that the newest query of each stream read: K and V of all tokens held. Syncs with the host."""
        return self.slots.held_bytes

    @property
    def notes_written(self) -> bool:
        """Whether a statistic reads every key and value that is written."""
        return self._writes

    @property
    def lost(self) -> str:
        """Reason that an existing kernel can't be used; empty if there is none."""
        return self._kernels.lost

    @property
    def plain_because(self) -> str:
        """Reason that no kernel walks blocks; empty if a kernel does, or if no block has to be walked."""
        return "" if self._shortcuts.form is not None or self.slots.capacity is None else self._kernels.plain_because
