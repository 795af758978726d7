"""Rows of cache slots: the operations of a step, in their order, and the operations of a run of steps.

Axis letters: L layers, B streams, H KV heads, R = L * B * H rows, G query heads of a KV head, T tokens of a run, S slots,
D key dim, Dv value dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from kvbench.harness.engine.held import HeldRows
from kvbench.harness.engine.pool import PagedStore, moves
from kvbench.harness.engine.slot_stores import Window, stages
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.victims import of_heads, of_layers, of_pages, ranks_without
from kvbench.policies import Attention, Policy, Seen
from kvbench.policies.merges import Evicted, Merging


class Rows(HeldRows):
    """Window on some rows of `Slots`, with the operations of steps and runs."""

    free: Tensor  # moved in place

    def place(self, rank: Tensor, step: Tensor, now: Tensor) -> None:
        """Enter the new token's rank and position for the free slot. rank, step: [R] int64; now: [L * B, 1, 1] int64."""
        if self._pages is not None:
            self._take_pages(self.free)
        self._tensors.flat_rank.index_copy_(0, self.free, rank)
        self._tensors.flat_position.index_copy_(0, self.free, step)
        for statistic, state in self._tensors.flat_states.items():  # updates also change the state of unused slots
            state.index_fill_(0, self.free, statistic.initial)
        self.view.step = now

    def write(self, key: Tensor, value: Tensor, run: Tensor | None = None) -> None:
        """Write the new token's K and V to the free slot, where it was placed, or a run's K and V to the run's slots.

        Args:
            key: [R, D], or [R * T, D].
            value: [R, Dv], or [R * T, Dv].
            run: flat indices of the run's slots; None for a single token. [R, T] int64.
        """
        indices = self.free if run is None else run.flatten()
        if self._pages is not None:
            if run is not None:
                self._take_pages(run[:, -1])
            indices = self._places(indices)
        self._keys.write(indices, key)
        self._values.write(indices, value)

    def used(self) -> Tensor:
        """Return the slots whose token is visible to the current query. [R, 1, S] bool."""
        held, window = self.rank < self._slots.empty_rank, self._slots.shape.sliding_window
        if window is not None and not self._slots.evicts_each_step:
            held = held & (self.view.age.flatten(0, 1) < window)
        return held[:, None]

    def observation_buffers(self) -> dict[Seen, Tensor]:
        """Allocate buffers for the parts of a step's attention that statistics read. [R, G, ...] each."""
        shape, attended, dtype = self._slots.shape, self.rank.shape[1], self._slots.dtype
        last = {"weights": attended, "logits": attended, "queries": shape.key_dim, "outputs": shape.value_dim}
        types = {"weights": self._slots.state_dtype, "logits": self._slots.state_dtype}
        size = len(self.rank), shape.group
        return {x: self.rank.new_empty(*size, last[x], dtype=types.get(x, dtype)) for x in self.observed_names}

    def update(self, observed: Mapping[Seen, Tensor], valid: Tensor | None) -> None:
        """Update the statistics with the attention of one step. observed: [R, G, ...] each; valid: [L * B, 1, 1]."""
        attention = Attention(**{name: x.unflatten(0, (-1, self.heads)) for name, x in observed.items()})
        for statistic, state in self.states.items():
            if not statistic.sees:
                continue
            new = statistic.update(state, attention, self.view)
            if valid is not None:
                new = torch.where(valid.view(-1, *[1] * (state.dim() - 1)), new, state)
            state.copy_(new)

    def release(self, valid: Tensor | None, due: bool, ragged: bool) -> None:
        """Evict tokens if an eviction is due, and choose the slot of the next token.

        Args:
            valid: streams in which the token counted; all when None. [L * B, 1, 1] bool.
            due: the host knows that every stream evicts now.
            ragged: the host does not know which streams evict now.
        """
        slots = self._slots
        if slots.capacity is None:
            self.free += 1 if valid is None else valid.expand(-1, slots.shape.heads, 1).flatten()
        elif slots.evicts_each_step:
            if due or ragged:
                self._evict(ragged)
            else:
                self.free += 1 if valid is None else valid.expand(-1, slots.shape.heads, 1).flatten()
        else:
            if due or ragged:
                self.evict_several()
            self.find_free()

    def _evict(self, ragged: bool) -> None:
        """Free the slot of the lowest (importance, rank), lexicographically.

        An invalid token changes nothing, so after it the free slot is chosen again.
        """
        empty, rank = self._slots.empty_rank, self.rank
        importance = self.importance(self._slots.policy, full=not ragged)
        if ragged:  # unused slots are chosen before any token
            importance = importance.masked_fill(rank == empty, float("-inf"))
            rank = rank.masked_fill(rank == empty, -1)
        lowest = importance.amin(-1, keepdim=True)
        victim_rank, victim = rank.masked_fill(importance > lowest, empty + 1).min(-1, keepdim=True)
        if isinstance(self._slots.policy, Merging):
            self.merge(self._slots.policy, torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, victim, victim_rank >= 0), 1)
        if self.summed:
            self.forget_one(victim, victim_rank >= 0)
        torch.add(victim[:, 0], self.row_base, out=self.free)
        if ragged:
            victim_rank = victim_rank.masked_fill(victim_rank < 0, empty)
        self.rank.sub_((self.rank > victim_rank).long())
        self._tensors.flat_rank.index_fill_(0, self.free, empty)

    def merge(self, policy: Merging, evicted: Tensor, most: int) -> None:
        """Merge evicted tokens into kept ones.

        Args:
            evicted: [R, S] bool.
            most: maximum number of evicted tokens of a row.

        Raises:
            ValueError: the policy returned tensors of other shapes.
        """
        window = self._slots.shape.sliding_window
        shown = evicted.unflatten(0, (-1, self.heads))
        visible = shown if window is None else shown & (self.view.age < window - 1)
        merged = policy.merge(self.view, Evicted.of(shown, visible, self.view, most))
        self._put_merged(self._values, "values", merged.values, self._slots.shape.value_dim)
        if merged.keys is not None:
            self._put_merged(self._keys, "keys", merged.keys, self._slots.shape.key_dim)
        for statistic, state in merged.states.items():
            self.states[statistic].copy_(state)

    def _put_merged(self, window: Window, name: str, merged: Tensor, dims: int) -> None:
        """Write the K or V that a merge returned. merged: [R / H, H, S, dims]."""
        expected = (*self.view.rank.shape, dims)
        if merged.shape != expected:
            raise ValueError(f"merge returned {name} of shape {list(merged.shape)}, expected {list(expected)}")
        window.put(merged.flatten(0, 1))

    def importance(self, policy: Policy, full: bool = False) -> Tensor:
        """Return a policy's importance of each token, -inf for tokens that no later query may see. [R, S] float32.

        full: every slot holds a token.
        """
        self.view.full = full
        window, importance = self._slots.shape.sliding_window, policy.importance(self.view).flatten(0, 1)
        self.view.full = False
        if window is not None:
            importance = importance.masked_fill(self.view.age.flatten(0, 1) >= window - 1, -inf)
        return importance

    def evict_several(self) -> None:
        """Cut each row to its budget, or each layer whose heads compete, once the excess per head reaches `every` tokens."""
        slots, budget, heads = self._slots, self._slots.budget, self._slots.shape.heads
        held = self.rank < slots.empty_rank
        importance = self.importance(slots.policy).masked_fill(~held, inf)
        count = held.sum(-1, keepdim=True)
        if budget.floor is None:
            excess = count - ((slots.capacity or 0) if self.budgets is None else self.budgets)
            excess, pages = excess.masked_fill(excess < slots.every, 0), budget.pages
            given = importance, self.rank, excess
            victims = of_heads(*given, slots.most_victims) if pages is None else of_pages(*given, pages, heads)
        else:
            by_layer = [x.unflatten(0, (-1, heads)) for x in (importance, self.rank, count)]
            excess = by_layer[2].sum(1) - heads * (slots.capacity or 0)
            victims = of_layers(
                by_layer[0],
                by_layer[1],
                excess.masked_fill(excess < heads * slots.every, 0),
                by_layer[2],
                budget.floor,
                slots.most_victims,
            ).flatten(0, 1)
        if isinstance(slots.policy, Merging):
            self.merge(slots.policy, victims, slots.most_victims)
        if self.summed:
            self.forget(victims)
        self.rank.copy_(ranks_without(victims, self.rank, slots.empty_rank))
        if (pool := self._tensors.pool) is not None:
            self._close_up(pool, victims, count)

    def _close_up(self, pool: Sequence[PagedStore], victims: Tensor, count: Tensor) -> None:
        """Move each row's last tokens to the slots of evicted tokens, and return the empty pages to the pool.

        victims: [R, S] bool; count: number of tokens before the eviction, [R, 1] int64.
        """
        tensors, (row, into, out_of) = self._tensors, moves(victims, count, self._slots.most_victims)
        into, out_of = into + self.row_base[row], out_of + self.row_base[row]
        for x in (tensors.flat_rank, tensors.flat_position, *tensors.flat_states.values()):
            x.index_copy_(0, into, x.index_select(0, out_of))
        into, out_of = self._places(into), self._places(out_of)
        for store in pool:
            store.flat.index_copy_(0, into, store.flat.index_select(0, out_of))
        left = count - victims.sum(-1, keepdim=True)
        self.rank.masked_fill_(torch.arange(self.rank.shape[1], device=left.device) >= left, self._slots.empty_rank)
        pool[0].table.give_back(self._part, left[:, 0])

    def find_free(self) -> None:
        """Choose the first empty slot of each row for the next token, possibly beyond the attended slots."""
        empty = (self._all_ranks == self._slots.empty_rank).to(torch.uint8)
        torch.add(empty.argmax(-1), self.row_base, out=self.free)

    def enter(self, free: Tensor, keys: Tensor, values: Tensor, ranks: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Write a run of tokens to free slots. [R, T], [R, T, D], [R, T, Dv], [R, T], [R, T].

        Returns:
            Keys and values that the run's tokens may see, as returned by `Window.entered`.
        """
        self._take_pages(free[:, -1])
        tensors, indices, old_keys, old_values = self._tensors, free.flatten(), self.keys, self.values
        tensors.flat_rank.index_copy_(0, indices, ranks.flatten())
        tensors.flat_position.index_copy_(0, indices, steps.flatten())
        for statistic, state in tensors.flat_states.items():
            state.index_fill_(0, indices, statistic.initial)
        indices = self._places(indices)
        new_keys = self._keys.entered(indices, keys.flatten(0, 1), old_keys)
        return new_keys, self._values.entered(indices, values.flatten(0, 1), old_values)

    def visible_to(self, ranks: Tensor, steps: Tensor) -> Tensor:
        """Return which keys from `enter` each token of a run sees. ranks, steps: ranks and steps of the tokens. [R, T] int64.

        Returns:
            [R, T, S] bool; with a codec, the masks of all storage stages, concatenated along the last axis.
        """
        sees, window, codec = self.rank[:, None] <= ranks[..., None], self._slots.shape.sliding_window, self._slots.codec
        if window is not None:
            sees = sees & (steps[..., None] - self.position[:, None] < window)
        if codec is None:
            return sees
        parts = stages(codec, self.position[:, None], self.rank[:, None], steps[..., None], ranks[..., None])
        return torch.cat([sees & part for part in parts], -1)

    def by_slot(self, observed: Mapping[Seen, Tensor]) -> dict[Seen, Tensor]:
        """Merge the storage stages in a run's attention. A coded slot appears once per stage, and is visible in one stage."""
        if self._slots.codec is None:
            return dict(observed)
        size = self.rank.shape[1]
        staged = {name: x.unflatten(-1, (-1, size)) for name, x in observed.items() if name in ("weights", "logits")}
        return {**observed, **{name: x.amax(-2) for name, x in staged.items()}}

    def update_together(self, observed: Mapping[Seen, Tensor]) -> None:
        """Update the statistics with the attention of several steps. observed: [R, G, T, ...] each."""
        attention = Attention(**{name: x.unflatten(0, (-1, self.heads)) for name, x in observed.items()})
        for statistic, state in self.states.items():
            if statistic.sees:
                state.copy_(statistic.update_run(state, attention, self.view))

    def end_run(self, free: Tensor, due: bool) -> None:
        """Finish a run: evict tokens if due, and choose the slot of the next token. free: the run's slots, [R, T] int64."""
        if due:
            self.release(None, due=True, ragged=False)
        elif self._slots.capacity is None:
            torch.add(free[:, -1], 1, out=self.free)
        else:
            self.find_free()


class Windows:
    """Cache of the `Rows` of one `Slots`. It is cleared when the tensors of the slots are replaced.

    Attributes:
        cached: rows by (slots attended, layer). Rows of another number of attended slots are dropped.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots, self._version = slots, slots.version
        self.cached: dict[tuple[int, int | None], Rows] = {}

    def __call__(self, attended: int, layer: int | None = None) -> Rows:
        """Return the rows of one layer, or of all layers. layer: index in the model."""
        if self._version != self._slots.version:
            self._version, self.cached = self._slots.version, {}
        if (attended, layer) not in self.cached:
            self.cached = {key: rows for key, rows in self.cached.items() if key[0] == attended}
            self.cached[attended, layer] = Rows(self._slots, attended, layer)
        return self.cached[attended, layer]
