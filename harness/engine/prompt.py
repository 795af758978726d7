"""Cut a prompt that was read under full attention: each head keeps its most important tokens, up to its budget.

Axis letters: B streams, L layers, H KV heads, N = B * H rows of a layer, S slots, n tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.core.evict import Pages
from kvbench.harness.engine.budgets import Table
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.victims import of_heads, of_layers, of_pages
from kvbench.policies import CacheView, Policy, Statistic
from kvbench.policies.merges import Merging


class Whole:
    """Fully cached prompt in the slots of all layers.

    Attributes:
        rows: rows of every layer, with the view of the prompt's last token.
    """

    def __init__(self, slots: Sequence[Slots], length: int, bound: Callable[[int | None], Policy]) -> None:
        """Open the rows of all layers.

        Args:
            slots: slots that hold whole layers.
            length: tokens of the prompt.
            bound: returns the policy for a budget.
        """
        self.length, self._bound = length, bound
        of_layer = {layer: group for group in slots for layer in group.layers}
        self._slots = [of_layer[layer] for layer in sorted(of_layer)]
        self.rows = [Rows(group, group.num_slots, layer) for layer, group in sorted(of_layer.items())]
        for rows in self.rows:
            rows.view.step = torch.full_like(rows.view.layer, length - 1)

    def cut(
        self, capacity: int | None, table: Table | None, pages: Pages | None = None
    ) -> tuple[list[Tensor], list[list[int]] | None]:
        """Choose the tokens that each head keeps: its most important tokens, up to its budget. Call it once.

        Args:
            capacity: mean number of tokens per head; None if the policy's budgets are an outcome.
            table: budgets known in advance; None if there are none.
            pages: pages that are evicted as a whole later. The prompt itself is cut by single tokens.

        Returns:
            Slots of the kept tokens, [N, S] bool for each layer, and the number of tokens that each head keeps, [L][H]; None
            instead of these numbers if the prompt decides them.

        Raises:
            ValueError: the policy's budgets have another shape, don't add up, or can't be combined with pages.
        """
        policy = self._bound(capacity)
        requested = policy.prompt_budgets([_on(rows.view, self._slots[0].device) for rows in self.rows], capacity)
        if requested is not None and pages is not None:
            raise ValueError("its heads keep different numbers of tokens, and whole pages need heads that keep equally many")
        if requested is not None:
            requested = self._checked(requested, None if policy.outcome else capacity)
        floor = policy.pool_floor(capacity) if requested is None and table is None and capacity is not None else None
        kept = []
        for layer, rows in enumerate(self.rows):
            of_layer = None if requested is None else requested[:, layer].to(rows.rank.device)
            of_table = None if table is None else table[layer]
            kept.append(self._kept_of_layer(layer, capacity, of_layer, of_table, floor, pages))
            evicted = (rows.rank < rows.rank.shape[1]) & ~kept[-1]
            if isinstance(policy, Merging):
                rows.merge(policy, evicted, rows.rank.shape[1])
            rows.forget(evicted)
        return kept, self._known_counts(capacity, table) if requested is None and floor is None else None

    def _known_counts(self, capacity: int | None, table: Table | None) -> list[list[int]]:
        """Return the number of tokens that each head keeps if budgets are known in advance. [L][H]."""
        counts = []
        for layer, slots in enumerate(self._slots):
            budgets = [capacity] * slots.shape.heads if table is None else table[layer]
            kept = [slots.shape.kept(n) for n in budgets]
            held = slots.shape.kept(self.length) or 0
            counts.append([held if n is None else min(held, n) for n in kept])
        return counts

    def _kept_of_layer(
        self,
        layer: int,
        capacity: int | None,
        requested: Tensor | None,
        of_table: Sequence[int] | None,
        floor: int | None,
        pages: Pages | None,
    ) -> Tensor:
        """Return the slots of one layer whose tokens are kept. [N, S] bool."""
        slots, rows = self._slots[layer], self.rows[layer]
        held, kept = rows.rank < slots.empty_rank, slots.shape.kept(capacity)
        importance = rows.importance(slots.policy).unflatten(0, (slots.streams, -1))
        count = held.sum(-1).view(slots.streams, -1)  # [B, H]
        budget = count if kept is None else torch.full_like(count, kept)
        if requested is not None:
            budget = requested
        elif of_table is not None:
            budget = torch.tensor(list(of_table), device=count.device).expand_as(count)
            for number in set(of_table):  # a head's importance comes from the policy bound to its budget
                judge = self._bound(slots.shape.kept(number))
                judged = rows.importance(judge).view(importance.shape)
                importance = torch.where((budget == number)[..., None], judged, importance)
        importance = importance.flatten(0, 1).masked_fill(~held, torch.inf)
        excess = (count - budget).clamp(min=0)
        if pages is not None:
            return held & ~of_pages(importance, rows.rank, excess.view(-1, 1), replace(pages, size=1), slots.shape.heads)
        if floor is None:
            return held & ~of_heads(importance, rows.rank, excess.view(-1, 1), self.length)
        worth, rank = (x.unflatten(0, (slots.streams, -1)) for x in (importance, rows.rank))
        return held & ~of_layers(worth, rank, excess.sum(1, keepdim=True), count[..., None], floor, self.length).flatten(0, 1)

    def _checked(self, requested: Tensor, capacity: int | None) -> Tensor:
        """Return the requested budgets, after checks of their shape and sum. [B, L, H] int64."""
        streams, heads = self._slots[0].streams, self._slots[0].shape.heads
        if requested.shape != (streams, len(self.rows), heads):
            raise ValueError(f"budgets of shape {list(requested.shape)}, expected {[streams, len(self.rows), heads]}")
        if capacity is not None:
            total, wanted = requested.sum((1, 2)), len(self.rows) * heads * min(capacity, self.length)
            if bool((total != wanted).any()):
                raise ValueError(f"budgets add up to {total.tolist()[0]} tokens, not to {wanted}")
        return requested.to(torch.int64)


def move(source: Rows, kept: Tensor, into: Rows, streams: int, heads: Sequence[int] | None, longest: int) -> None:
    """Copy the kept tokens, oldest first.

    Args:
        kept: slots whose tokens are kept. [N, S] bool.
        into: empty rows of some heads of the same layer.
        heads: indices of these heads; all when None.
        longest: maximum number of tokens that a head keeps.
    """

    def chosen(x: Tensor) -> Tensor:
        return x if heads is None else x.unflatten(0, (streams, -1))[:, list(heads)].flatten(0, 1)

    stays, rank = chosen(kept), chosen(source.rank)
    counts = stays.sum(-1)
    order = rank.masked_fill(~stays, rank.shape[1] + 1).argsort(-1)[:, :longest]
    keys, values = (chosen(x).take_along_dim(order[..., None], 1) for x in (source.keys, source.values))
    into.put(keys, values, chosen(source.position).take_along_dim(order, 1), counts)
    for statistic, state in into.states.items():
        old = chosen(source.states[statistic].flatten(0, 1))
        if statistic.per == "slot":
            state.flatten(0, 1)[:, :longest] = old.take_along_dim(order.view(*order.shape, *[1] * (old.dim() - 2)), 1)
        else:
            state.flatten(0, 1).copy_(old)
    into.count_again()  # a later eviction must subtract what the sum contains of a token


def _on(view: CacheView, device: torch.device) -> CacheView:
    """Return the view on a device; the view itself if it is already there."""
    return view if view.rank.device == device else _Elsewhere(view, device)


class _Moved(dict[Statistic, Tensor]):
    """Statistics that are moved to a device on first access."""

    def __init__(self, states: dict[Statistic, Tensor], device: torch.device) -> None:
        super().__init__(states)
        self._device, self._known = device, dict[Statistic, Tensor]()

    def __getitem__(self, statistic: Statistic) -> Tensor:
        if statistic not in self._known:
            self._known[statistic] = super().__getitem__(statistic).to(self._device)
        return self._known[statistic]


class _Elsewhere(CacheView):
    """View of a layer on another device. Its tensors are moved on first access."""

    def __init__(self, view: CacheView, device: torch.device) -> None:
        """Wrap a layer's view. device: device to which its tensors are moved."""
        self._view, self._device, self._tensors = view, device, dict[str, Tensor]()
        self.states, self.num_layers, self.seed = _Moved(view.states, device), view.num_layers, view.seed
        self.rotate = partial(_rotated_elsewhere, view)  # a method would keep tensors until the garbage collector runs

    def __getattr__(self, name: str) -> Any:
        """Return a tensor of the view, which is moved on first access."""
        if name not in ("rank", "position", "keys", "values", "head", "step", "layer", "prompt"):
            raise AttributeError(name)
        if name not in self._tensors:
            self._tensors[name] = getattr(self._view, name).to(self._device)
        return self._tensors[name]


def _rotated_elsewhere(view: CacheView, x: Tensor, position: Tensor) -> Tensor:
    """`CacheView.rotate` with the RoPE tables on the device of a view."""
    home = view.rank.device
    return view.rotate(x.to(home), position.to(home)).to(x.device)
