"""The end of a prompt that was read under full attention: each head keeps its budget of what is worth most, at once.

Axis letters: B streams, L layers, H KV heads, N = B * H rows of a layer, S slots, n tokens kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.harness.engine.budgets import Table
from kvbench.harness.engine.rows import Rows, effective_importance
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.victims import of_heads, of_layers
from kvbench.policies import Policy


class Whole:
    """A prompt in the slots of all layers.

    Attributes:
        length: tokens of the prompt.
        rows: of every layer, with the view of its last token.
    """

    def __init__(self, slots: Sequence[Slots], length: int) -> None:
        """slots: of all layers, with whole layers in each."""
        self.length = length
        of_layer = {layer: group for group in slots for layer in group.layers}
        self._slots = [of_layer[layer] for layer in sorted(of_layer)]
        self.rows = [group.rows(group.num_slots, layer) for layer, group in sorted(of_layer.items())]
        for rows in self.rows:
            rows.view.step = torch.full_like(rows.view.layer, length - 1)

    def kept(self, policy: Policy, capacity: int | None, table: Table | None) -> list[Tensor]:
        """The slots whose tokens stay: of each head as many as its budget says, those worth most.

        Args:
            policy: bound to the capacity.
            capacity: tokens per head, on average; None if the policy's budgets are an outcome.
            table: budgets known beforehand; None if there are none.

        Returns:
            [N, S] bool, one a layer.

        Raises:
            ValueError: the policy's budgets have another shape, or don't add up.
        """
        asked = policy.prompt_budgets([rows.view for rows in self.rows], capacity)
        if asked is not None:
            asked = self._checked(asked, None if policy.outcome else capacity)
        floor = policy.pool_floor(capacity) if asked is None and table is None and capacity is not None else None
        return [
            self._kept_of_layer(
                layer, capacity, None if asked is None else asked[:, layer], None if table is None else table[layer], floor
            )
            for layer in range(len(self.rows))
        ]

    def _kept_of_layer(
        self, layer: int, capacity: int | None, asked: Tensor | None, of_table: Sequence[int] | None, floor: int | None
    ) -> Tensor:
        """The slots of one layer whose tokens stay. [N, S] bool."""
        slots, rows = self._slots[layer], self.rows[layer]
        held, kept = rows.rank < slots.empty_rank, slots.shape.kept(capacity)
        importance = effective_importance(slots.policy, rows.view, slots.shape.sliding_window).masked_fill(~held, torch.inf)
        count = held.sum(-1).view(slots.streams, -1)  # [B, H]
        budget = count if kept is None else torch.full_like(count, kept)
        if asked is not None:
            budget = asked
        elif of_table is not None:
            budget = torch.tensor(list(of_table), device=count.device).expand_as(count)
        excess = (count - budget).clamp(min=0)
        if floor is None:
            return held & ~of_heads(importance, rows.rank, excess.view(-1, 1))
        worth, rank = (x.unflatten(0, (slots.streams, -1)) for x in (importance, rows.rank))
        return held & ~of_layers(worth, rank, excess.sum(1, keepdim=True), count[..., None], floor).flatten(0, 1)

    def _checked(self, asked: Tensor, capacity: int | None) -> Tensor:
        """Budgets for the prompt, if they are possible. [B, L, H] int64."""
        streams, heads = self._slots[0].streams, self._slots[0].shape.heads
        if asked.shape != (streams, len(self.rows), heads):
            raise ValueError(f"budgets of shape {list(asked.shape)}, expected {[streams, len(self.rows), heads]}")
        if capacity is not None:
            total, wanted = asked.sum((1, 2)), len(self.rows) * heads * min(capacity, self.length)
            if bool((total != wanted).any()):
                raise ValueError(f"budgets add up to {total.tolist()[0]} tokens, not to {wanted}")
        return asked.to(torch.int64)


def move(source: Rows, kept: Tensor, into: Rows, streams: int, heads: Sequence[int] | None) -> None:
    """Copy the tokens that stay, oldest first.

    Args:
        source: of a whole layer.
        kept: slots whose tokens stay. [N, S] bool.
        into: empty rows of the same layer, of some of its heads.
        streams: B.
        heads: which ones; all when None.
    """

    def chosen(x: Tensor) -> Tensor:
        return x if heads is None else x.unflatten(0, (streams, -1))[:, list(heads)].flatten(0, 1)

    stays, rank = chosen(kept), chosen(source.rank)
    counts = stays.sum(-1)
    longest = int(counts.max())
    order = rank.masked_fill(~stays, rank.shape[1] + 1).argsort(-1)[:, :longest]
    keys, values = (chosen(x).take_along_dim(order[..., None], 1) for x in (source.keys, source.values))
    into.put(keys, values, chosen(source.position).take_along_dim(order, 1))
    into.shorten(counts)
    for statistic, state in into.states.items():
        old = chosen(source.states[statistic].flatten(0, 1))
        if statistic.per == "slot":
            state.flatten(0, 1)[:, :longest] = old.take_along_dim(order.view(*order.shape, *[1] * (old.dim() - 2)), 1)
        else:
            state.flatten(0, 1).copy_(old)
