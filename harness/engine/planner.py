"""Decides how a block is read: once, when it comes.

Axis letters: L layers, B streams, H KV heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, D key dim,
Dv value dim, P pairs of dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvbench.harness.engine.closed_form import ClosedForm
from kvbench.harness.engine.kernels.choose import Kernels
from kvbench.harness.engine.method import Method
from kvbench.harness.engine.placement import Placement
from kvbench.harness.engine.plan import Block, Closed, CompiledWalk, Fill, Places, PlainWalk, Plan, QueryFactors, Runs, Step
from kvbench.harness.engine.rows import Rows, writes
from kvbench.harness.engine.slots import Slots

_MIN_COMPILED_TOKENS = 4  # shorter blocks don't repay the kernel's copies
_MAX_BATCHED_ROPE_ELEMENTS = 2**20  # of the keys of all layers; above this, each layer computes its own RoPE


class _Steady(NamedTuple):
    """Where a step's token goes in a full cache."""

    rank: Tensor  # [R] int64
    factors: list[QueryFactors | None]  # RoPE of its queries, by layer


class Planner:
    """Plans the blocks of one `Slots`.

    Attributes:
        ordered: the slots hold their tokens oldest first.
        steady: of the step before, where that of the next one is the same.
    """

    def __init__(self, slots: Slots, placement: Placement, form: ClosedForm | None, kernels: Kernels, method: Method) -> None:
        """Plan for some slots.

        Args:
            slots: of the layers.
            placement: RoPE of the layers.
            form: the closed form of their blocks, if they have one and it may be used.
            kernels: that serve them and may be used.
            method: shortcuts that may be taken.
        """
        self._slots, self._placement, self._form, self._kernels, self._method = slots, placement, form, kernels, method
        self._writes = any(writes(s) for s in slots.tensors.states)
        self.ordered = True
        self.steady: _Steady | None = None

    def __call__(self, block: Block) -> Plan:
        """The plan of a block. The rank and position of a single token are entered here, for all layers at once."""
        plan = self._plan_of_many(block) if block.tokens > 1 else self._plan_of_one(block)
        if not isinstance(plan, Step):
            self.steady = None
        return plan

    def reads_at_once(self, block: Block) -> bool:
        """Whether a block can pass one layer before it enters the next.

        Where layers share a cache, a token is evicted only after the last of them has seen what is held. So a block must pass
        token by token, unless nothing is evicted while it is read, or what each token sees is known beforehand.
        """
        if self._slots.shape.readers == 1 or block.tokens == 1:
            return True
        if self._can_fill(block):
            return True
        return self._form is not None and block.seen is not None and self._form.takes(block.tokens, block.seen)

    def note_end(self, plan: Plan, block: Block) -> None:
        """Note the order of the slots after a block."""
        evicted = not self.still_filling(block.end)
        match plan:
            case Closed():
                self.ordered = True
            case CompiledWalk():
                self.ordered = plan.kernel.leaves_ordered or (self.ordered and not evicted)
            case _:
                self.ordered = self.ordered and not evicted

    def still_filling(self, seen: int | None) -> bool:
        """Whether no token has been evicted after `seen` tokens; None: the host does not know."""
        return self._slots.capacity is None or (seen is not None and seen <= self._slots.capacity)

    def _plan_of_many(self, block: Block) -> Plan:
        """How a block of several tokens is read."""
        slots, seen = self._slots, block.seen
        if self._can_fill(block):
            return Fill(seen or 0, block.ids)
        if seen is not None and self._form is not None and self._form.takes(block.tokens, seen):
            return Closed(self._form, seen, self.ordered)
        attended = slots.attended(None if block.end is None else slots.used(block.end))
        rows = slots.rows(attended, slots.layers[0])  # places are the same in every layer
        compiled = self._method.walk_kernel and block.tokens >= _MIN_COMPILED_TOKENS and seen is not None
        kernel = self._kernels.walk if compiled else None
        if kernel is not None:
            factors = None if kernel.rotates else self._placement.of_block(self._ranks(block), block.steps)
            return CompiledWalk(kernel, factors, attended, seen or 0, self.ordered, block)
        places = self._places(block, rows)
        lengths = self._runs(block)
        if lengths is not None and seen is not None:
            updates = bool(slots.sees) and seen + block.tokens > slots.quiet
            return Runs(lengths, slots.cadence.evicts(seen + block.tokens), places, attended, updates)
        return PlainWalk(places, attended)

    def _runs(self, block: Block) -> list[int] | None:
        """The runs that a block may be read in; None if it has to be walked token by token."""
        if (
            block.seen is None
            or not self._method.fill
            or (self._placement.mode == "clamped" and (block.end or 0) > self._placement.limit)
        ):
            return None
        lengths = self._slots.cadence.runs(block.seen, block.tokens)
        return lengths if len(lengths) == 1 or self._slots.every > 1 else None

    def _plan_of_one(self, block: Block) -> Step:
        """How a single token is read; its rank and position are entered here, for all layers at once."""
        slots = self._slots
        kernel = self._kernels.step if self._method.step_kernel and slots.sees <= {"weights"} else None
        attended = slots.attended(None if block.end is None else slots.used(block.end))
        rows = slots.rows(attended)
        places = self._places(block, rows)
        rank = rows.count() if places.ranks[0] is None else places.ranks[0]
        if slots.uneven and block.valid is not None:
            rank = rank.masked_fill(~rows.of_streams(block.valid)[:, 0], slots.empty_rank)
        rows.place(rank, places.steps[0], places.now[0])
        layers, seen = len(slots.layers), rows.room_for_seen()
        by_layer = {name: x.unflatten(0, (layers, -1)).unbind(0) for name, x in seen.items()}
        seen_of_layer = [{name: parts[at] for name, parts in by_layer.items()} for at in range(layers)]
        if kernel is not None:
            return Step(places, rows, attended, seen, seen_of_layer, kernel)
        nothing = [None] * layers
        used = nothing if places.evicts[0] and slots.evicts_each_step else rows.used().unflatten(0, (layers, -1)).unbind(0)
        key_factors = nothing
        if self._placement.rotation is not None and rows.keys.numel() <= _MAX_BATCHED_ROPE_ELEMENTS:
            of_rows = self._placement.of_keys(rows, places.steps[0])
            key_factors = nothing if of_rows is None else of_rows.unflatten(0, (layers, -1)).unbind(0)
        return Step(places, rows, attended, seen, seen_of_layer, None, self._step_factors(block, rank), used, key_factors)

    def _step_factors(self, block: Block, rank: Tensor) -> list[QueryFactors | None]:
        """RoPE of a step's queries, by layer. rank: of the token in all rows, [R] int64."""
        slots, layers = self._slots, len(self._slots.layers)
        if self._placement.rotation is None:
            return [None] * layers
        if self.steady is not None and block.seen is not None:
            return self.steady.factors
        steps = slots.rows(slots.num_slots, slots.layers[0]).of_streams(block.steps)[:, 0]
        if slots.uneven:
            return [self._placement.of_step(of_layer, steps) for of_layer in rank.view(layers, -1)]
        ranks = slots.rows(slots.num_slots, slots.layers[0]).of_streams(self._ranks(block))[:, 0]
        factors = self._placement.of_step(ranks, steps)
        # Once the cache is full, the rank of the newest token stays the same, and so does the place of its query.
        if (
            self._placement.mode != "stream"
            and slots.evicts_each_step
            and block.end is not None
            and slots.cadence.evicts(block.end)
        ):
            self.steady = _Steady(rank, [factors] * layers)
        return [factors] * layers

    def _can_fill(self, block: Block) -> bool:
        """Whether nothing that the block's tokens do depends on the walk: no eviction, no updates, true distances."""
        slots = self._slots
        if block.end is None or not self._method.fill or slots.cadence.dropped or (slots.sees and block.end > slots.quiet):
            return False
        if slots.budget.of_rows is not None:  # of a prompt some heads hold less than others, even if one of them holds all
            return False
        return (slots.capacity is None or block.end <= slots.capacity) and (
            self._placement.mode != "clamped" or block.end <= self._placement.limit
        )

    def _ranks(self, block: Block) -> Tensor:
        """Ranks of the new tokens, in heads that all hold as many. [B, T] int64."""
        return self._slots.cadence.held_of(block.steps)

    def _places(self, block: Block, rows: Rows) -> Places:
        """Where the tokens go in these rows."""
        slots, seen, steady = self._slots, block.seen, self.steady
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
