"""Expected Attention: keep the tokens that queries yet to come are expected to attend to.

Source: Devoto et al. 2025, arXiv:2510.00636. Read in NVIDIA/kvpress 8bb29b9, `presses/expected_attention_press.py`, by the same
authors: the rule here. Their leaderboard's "expected_attention" is AdaKV with this score and `epsilon: 0.01`.
Differs: mean and covariance come from running sums in float64. The sinks are never evicted; in kvpress they get the largest
score of all heads, plus 1. `use_covariance: false` is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistic import Attention, HeadSizes, Seen, Statistic
from kvbench.policies.statistics import ValueNorm
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class QueryMoments(Statistic):
    """The sum of x xᵀ over the unrotated queries q of all steps from `first` on, where x = [1, q]: number, sum and products.

    [B, H, G, 1 + D, 1 + D] float64.
    """

    sees: ClassVar[tuple[Seen, ...]] = ("queries",)
    per: ClassVar[Literal["slot", "head"]] = "head"

    first: int  # step

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """A matrix for every query head."""
        return sizes.group, 1 + sizes.key_dim, 1 + sizes.key_dim

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add this step's queries."""
        queries = attention.queries.double()
        x = torch.cat([torch.ones_like(queries[..., :1]), queries], -1) * (view.step >= self.first)[..., None]
        return state + x[..., :, None] * x[..., None, :]

    def update_run(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add these steps' queries."""
        queries = attention.queries.double()  # [B, H, G, T, D]
        steps = view.step[..., None, None] - torch.arange(queries.shape[3] - 1, -1, -1, device=queries.device)[:, None]
        x = torch.cat([torch.ones_like(queries[..., :1]), queries], -1) * (steps >= self.first)
        return state + x.mT @ x


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Keep the sinks, and the tokens with the highest expected attention times the norm of their value.

    Queries to come are taken as normally distributed, with the mean and covariance of those seen so far, turned by the mean
    rotation of the next `horizon` positions.
    """

    scope = "head"

    sinks: int = 4  # tokens that open the stream: never evicted, and their queries are not counted
    horizon: int = 512  # positions
    epsilon: float = 0.0  # added to the expected attention weight
    value_norm: bool = True  # whether to multiply by the norm of the value

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Moments of the queries and, if asked for, norms of the values."""
        return (QueryMoments(self.sinks), *([ValueNorm()] if self.value_norm else []))

    def bind(self, capacity: int) -> Self:
        """The sinks leave room for at least one other token."""
        if self.horizon < 1:
            raise ValueError(f"horizon {self.horizon} is below 1")
        if not 0 <= self.sinks < capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + at least 1 other token")
        return self

    def importance(self, view: CacheView) -> Tensor:
        """(weight + epsilon) x |v|, the weight averaged over the query group. [B, H, S] float32; sinks are never evicted."""
        sinks = view.position < self.sinks
        logits = self._expected_logits(view).masked_fill((sinks | ~view.valid)[:, :, None], torch.finfo(torch.float32).min)
        worth = logits.softmax(-1).mean(2) + self.epsilon
        return (worth * view.state(ValueNorm()) if self.value_norm else worth).masked_fill(sinks, inf)

    def _expected_logits(self, view: CacheView) -> Tensor:
        """The logarithm of the expected exponential of each query head's logit. [B, H, G, S] float32."""
        moments = view.state(QueryMoments(self.sinks))
        seen = moments[..., :1, :1].clamp(min=1)
        mean = moments[..., :1, 1:] / seen  # [B, H, G, 1, D]
        covariance = (moments[..., 1:, 1:] / seen - mean.mT * mean).float()
        keys, dim = self._turned_back(view)[:, :, None], view.keys.shape[-1]
        variance = (keys @ covariance * keys).sum(-1)
        return (keys * mean.float()).sum(-1) / dim**0.5 + variance / (2 * dim)

    def _turned_back(self, view: CacheView) -> Tensor:
        """Rotated keys, times the transpose of the mean rotation of the positions to come. [B, H, S, D] float32.

        Turning the keys back is turning mean and covariance forward: only products of the two are used.
        """
        device = view.step.device
        ones = torch.zeros(self.horizon, view.keys.shape[-1], device=device)
        ones[:, ::2] = 1
        ahead = view.rotate(ones, torch.arange(1, self.horizon + 1, device=device)).mean(0)  # [D]
        mean = view.rotate(ahead.expand(*view.step.shape, -1).contiguous(), view.step)  # [B, 1, 1, D]
        (real, imaginary), (a, b) = _pairs(mean), _pairs(view.rotated_keys.float())
        return torch.stack([a * real + b * imaginary, b * real - a * imaginary], -1).flatten(-2)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of every two neighbouring dims. [..., D] -> [..., P] each."""
    return x[..., ::2], x[..., 1::2]
