"""What rows do after a token: evict what is due, and find the slot for the next one.

Axis letters: L layers, B streams, H KV heads, R rows, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from kvbench.harness.engine.pool import PagedStore, moves
from kvbench.harness.engine.slot_tensors import SlotTensors
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.victims import of_heads, of_layers, of_pages, ranks_without
from kvbench.policies import CacheView, Policy, Statistic


class Evicting:
    """The part of `Rows` that takes tokens out."""

    rank: Tensor
    free: Tensor
    view: CacheView
    summed: list[Statistic]
    _slots: Slots
    _tensors: SlotTensors
    _part: slice
    _all_ranks: Tensor
    _row_base: Tensor
    _budgets: Tensor | None

    def forget(self, victims: Tensor) -> None:
        """Take evicted tokens out of sums over what a head holds. victims: [R, S] bool, before their slots are given away."""
        raise NotImplementedError

    def _at(self, slots: Tensor) -> Tensor:
        """Where K and V of slots lie. Flat indices, [n] int64 -> the same."""
        raise NotImplementedError

    def release(self, valid: Tensor | None, due: bool, ragged: bool) -> None:
        """Evict what is due, and find the slot for the next token.

        Args:
            valid: streams in which the token counted; all when None. [L * B, 1, 1] bool.
            due: tokens are evicted now, as far as the host knows.
            ragged: the host does not know for which streams that is so.
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

    def find_free(self) -> None:
        """Let the next token take the first empty slot of each row, perhaps beyond those attended."""
        empty = (self._all_ranks == self._slots.empty_rank).to(torch.uint8)
        torch.add(empty.argmax(-1), self._row_base, out=self.free)

    def importance(self, policy: Policy) -> Tensor:
        """The importance that decides who is evicted: a policy's, and -inf for what no later query may see. [R, S] float32."""
        window, importance = self._slots.shape.sliding_window, policy.importance(self.view).flatten(0, 1)
        if window is not None:
            importance = importance.masked_fill(self.view.age.flatten(0, 1) >= window - 1, -inf)
        return importance

    def evict_several(self) -> None:
        """Cut every row, or every layer whose heads compete, back to its budget if `every` tokens more are held."""
        slots, budget, heads = self._slots, self._slots.budget, self._slots.shape.heads
        held = self.rank < slots.empty_rank
        importance = self.importance(slots.policy).masked_fill(~held, inf)
        count = held.sum(-1, keepdim=True)
        if budget.floor is None:
            excess = count - ((slots.capacity or 0) if self._budgets is None else self._budgets)
            excess, pages = excess.masked_fill(excess < slots.every, 0), budget.pages
            given = importance, self.rank, excess
            victims = of_heads(*given, slots.most_victims) if pages is None else of_pages(*given, pages, heads)
        else:
            by_layer = [x.unflatten(0, (-1, heads)) for x in (importance, self.rank, count)]
            excess = by_layer[2].sum(1) - heads * (slots.capacity or 0)
            victims = of_layers(
                by_layer[0], by_layer[1], excess.masked_fill(excess < heads * slots.every, 0), by_layer[2], budget.floor,
                slots.most_victims,
            ).flatten(0, 1)  # fmt: skip
        if self.summed:
            self.forget(victims)
        self.rank.copy_(ranks_without(victims, self.rank, slots.empty_rank))
        if (pool := self._tensors.pool) is not None:
            self._close_up(pool, victims, count)

    def _close_up(self, pool: Sequence[PagedStore], victims: Tensor, count: Tensor) -> None:
        """In a pool, let each row's last tokens take the slots of its victims, and give back the pages that this leaves empty.

        victims: [R, S] bool; count: tokens before, [R, 1] int64.
        """
        tensors, (row, into, out_of) = self._tensors, moves(victims, count, self._slots.most_victims)
        into, out_of = into + self._row_base[row], out_of + self._row_base[row]
        for x in (tensors.flat_rank, tensors.flat_position, *tensors.flat_states.values()):
            x.index_copy_(0, into, x.index_select(0, out_of))
        into, out_of = self._at(into), self._at(out_of)
        for store in pool:
            store.flat.index_copy_(0, into, store.flat.index_select(0, out_of))
        left = count - victims.sum(-1, keepdim=True)
        self.rank.masked_fill_(torch.arange(self.rank.shape[1], device=left.device) >= left, self._slots.empty_rank)
        pool[0].table.give_back(self._part, left[:, 0])

    def _evict(self, ragged: bool) -> None:
        """Free the slot of the lowest (importance, rank), lexicographically.

        After an invalid token nothing has changed, so this frees again the slot that was free.
        """
        empty, rank = self._slots.empty_rank, self.rank
        importance = self.importance(self._slots.policy)
        if ragged:  # an unused slot goes before any token
            importance = importance.masked_fill(rank == empty, float("-inf"))
            rank = rank.masked_fill(rank == empty, -1)
        lowest = importance.amin(-1, keepdim=True)
        worst, victim = rank.masked_fill(importance > lowest, empty + 1).min(-1, keepdim=True)
        if self.summed:
            self.forget(torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, victim, worst >= 0))
        torch.add(victim[:, 0], self._row_base, out=self.free)
        if ragged:
            worst = worst.masked_fill(worst < 0, empty)
        self.rank.sub_((self.rank > worst).long())
        self._tensors.flat_rank.index_fill_(0, self.free, empty)
