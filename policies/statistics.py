"""Statistics that policies can declare.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, D key dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.policies.statistic import Attention, HeadSizes, Seen, Statistic, Written
from kvbench.policies.view import CacheView

__all__ = [
    "AttentionSum", "KeyNorm", "Recent", "RecentAttention", "RecentAttentionByQueryHead", "Statistic", "TokenId", "ValueNorm",
]  # fmt: skip


@dataclass(frozen=True)
class AttentionSum(Statistic):
    """Attention a token has received since it was cached: softmax weights summed over steps and the query group.

    Source: Zhang et al. 2023, arXiv:2306.14048, Algorithm 1 (the accumulated score).
    """

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add the group's attention at this step. [B, H, S] float32."""
        return state + attention.weights.sum(2)

    def update_run(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add the group's attention at these steps. [B, H, S] float32."""
        return state + attention.weights.sum((2, 3))


@dataclass(frozen=True)
class Recent(Statistic):
    """A number of each of the `window` newest queries, this step's included: [B, H, S, *k, window]. A subclass says which.

    The query of step t is at index `t % window`. Queries from before the token was cached give `initial`.
    """

    window: int  # steps

    @property
    def last(self) -> int:
        """The window."""
        return self.window

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """One number per query of the window."""
        return (self.window,)

    def put(self, state: Tensor, newest: Tensor, view: CacheView) -> Tensor:
        """Put this step's numbers, [B, H, S, *k], in the place of the oldest. [B, H, S, *k, window] float32."""
        index = (view.step % self.window)[(..., *[None] * (newest.dim() - 2))]
        return torch.where(torch.arange(self.window, device=state.device) == index, newest[..., None], state)


@dataclass(frozen=True)
class RecentAttention(Recent):
    """Attention from each of the `window` newest queries, summed over the query group: [B, H, S, window]."""

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Put this step's attention in the place of the oldest. [B, H, S, window] float32."""
        return self.put(state, attention.weights.sum(2), view)

    def update_run(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Put the newest of these steps' attention in the place of the oldest. [B, H, S, window] float32."""
        weights = attention.weights[..., -self.window :, :].sum(2).transpose(-1, -2)  # [B, H, S, steps]
        steps = view.step[..., None] - torch.arange(weights.shape[-1] - 1, -1, -1, device=state.device)
        return state.scatter(-1, (steps % self.window).expand_as(weights), weights)


@dataclass(frozen=True)
class RecentAttentionByQueryHead(Recent):
    """Attention from each of the `window` newest queries, of every query head of the group: [B, H, S, G, window]."""

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """One number per query head and query of the window."""
        return sizes.group, self.window

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Put this step's attention in the place of the oldest. [B, H, S, G, window] float32."""
        return self.put(state, attention.weights.transpose(2, 3), view)


@dataclass(frozen=True)
class KeyNorm(Statistic):
    """The L2 norm of a token's key. RoPE does not change it."""

    sees: ClassVar[tuple[Seen, ...]] = ()

    def written(self, token: Written) -> Tensor:
        """[*n] float32."""
        return token.keys.float().norm(dim=-1)


@dataclass(frozen=True)
class ValueNorm(Statistic):
    """The L2 norm of a token's value."""

    sees: ClassVar[tuple[Seen, ...]] = ()

    def written(self, token: Written) -> Tensor:
        """[*n] float32."""
        return token.values.float().norm(dim=-1)


@dataclass(frozen=True)
class TokenId(Statistic):
    """The token's id, exact up to 2^24, as `CacheView.tokens` reads it."""

    sees: ClassVar[tuple[Seen, ...]] = ()

    def written(self, token: Written) -> Tensor:
        """[*n] float32."""
        return token.ids.expand(token.keys.shape[:-1]).float()
