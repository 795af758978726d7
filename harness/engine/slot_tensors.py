"""The tensors of slots.

Axis letters: R rows of all layers, S slots, D key dim, Dv value dim, k extra axes of a statistic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.engine.kivi import KiviKeys, KiviValues
from kvbench.harness.engine.pool import PagedStore, PageTable, moved
from kvbench.harness.engine.slot_stores import CodedStore, FloatStore, Store, extended
from kvbench.policies import Statistic

AnyStore = Store | PagedStore


class SlotTensors:
    """The tensors of `Slots`, and flat views that steps write through. Replaced as a whole when the slots grow."""

    def __init__(
        self, keys: AnyStore, values: AnyStore, rank: Tensor, position: Tensor, states: dict[Statistic, Tensor], offset: Tensor
    ) -> None:
        """Wrap tensors.

        Args:
            keys: store of the keys in R rows and S slots.
            values: store of the values in R rows and S slots.
            rank: rank of each slot's token; S for an empty slot. [R, S] int64.
            position: position of each slot's token; -1 for a slot that was never used. [R, S] int64.
            states: state of each statistic. [R, S, *k], or [R, *k] for a statistic that is kept per head.
            offset: index of each row's free slot, which the next token takes. [R] int64.
        """
        rows, slots = rank.shape
        self.keys, self.values, self.rank, self.position, self.states = keys, values, rank, position, states
        self.pool = (keys, values) if isinstance(keys, PagedStore) and isinstance(values, PagedStore) else None
        self.pages = None if self.pool is None else self.pool[0].table
        self.row_base = torch.arange(rows, device=rank.device) * slots  # flat index of each row's first slot. [R]
        self.free = self.row_base + offset  # flat index of each row's free slot. [R]
        self.flat_rank, self.flat_position = rank.flatten(), position.flatten()
        self.flat_states = {s: x.flatten(0, 1) for s, x in states.items() if s.per == "slot"}

    def extended(self, slots: int) -> SlotTensors:
        """Return a copy with `slots` slots, the new ones empty."""
        self.rank.masked_fill_(self.rank == self.rank.shape[1], slots)
        states = {s: extended(x, slots, s.initial) if s.per == "slot" else x for s, x in self.states.items()}
        keys, values = self._stores(slots=slots)
        rank, position = extended(self.rank, slots, slots), extended(self.position, slots, -1)
        return SlotTensors(keys, values, rank, position, states, self.free - self.row_base)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> SlotTensors:
        """Return a copy with `change`, which may select or repeat rows, applied to every tensor."""
        states = {s: change(x) for s, x in self.states.items()}
        keys, values = self._stores(change=change)
        return SlotTensors(keys, values, change(self.rank), change(self.position), states, change(self.free - self.row_base))

    def repaged(self, pages: int) -> SlotTensors:
        """Return a copy with `pages` pages in each layer's pool."""
        return SlotTensors(*self._stores(pages=pages), self.rank, self.position, self.states, self.free - self.row_base)

    def _stores(
        self, slots: int | None = None, change: Callable[[Tensor], Tensor] | None = None, pages: int | None = None
    ) -> tuple[AnyStore, AnyStore]:
        """Return copies of K and V with more slots, with changed rows, or in a pool with more pages."""
        if self.pool is not None:
            old = self.pool[0].table
            if change is not None:
                table = change(old.table)
                return moved(self.pool, table, self.rank.shape[1], old.used(table))
            return moved(self.pool, old.table, slots or self.rank.shape[1], pages or old.pages)
        assert not isinstance(self.keys, PagedStore)
        assert not isinstance(self.values, PagedStore)
        if change is not None:
            return self.keys.mapped(change), self.values.mapped(change)
        return self.keys.extended(slots or 0), self.values.extended(slots or 0)


def empty_stores(codec: Codec | None, keys: Tensor, values: Tensor, pages: PageTable | None) -> tuple[AnyStore, AnyStore]:
    """Create empty stores. keys, values: expanded zeros, which give shape and dtype. [R, S, D], [R, S, Dv]."""
    if pages is not None:
        return PagedStore.empty(pages, keys), PagedStore.empty(pages, values)
    if codec is None:
        return FloatStore(keys.contiguous()), FloatStore(values.contiguous())
    if isinstance(codec, Kivi):
        return KiviKeys.empty(codec, keys), KiviValues.of_kivi(codec, values)
    return CodedStore.empty(codec, keys), CodedStore.empty(codec, values)
