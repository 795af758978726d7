"""RoCo: evict the lowest mean attention, but not among the tokens whose attention varies most.

Source: Ren & Zhu 2024, arXiv:2402.06262, Section 4; the authors' code DRSY/EasyKV a1d71ca, easykv/easykv.py, mode `roco`, with
`kv_mode` `decoding`: it protects int(0.3 * capacity) + 1 tokens: the 10 newest, then those with the largest deviation.
Differs: a prompt is treated like any other tokens; the authors never evict from it while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistic import Attention, Statistic
from kvbench.policies.statistics import AttentionSum
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class AttentionSquareSum(Statistic):
    """Squares of the attention a token has received, summed over steps: of the sum over the query group at each step."""

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Add the square of the group's attention at this step. [B, H, S] float32."""
        received = attention.weights.sum(2)
        return state + received * received


@dataclass(frozen=True)
class RoCo(Policy):
    """Keep the `protected` tokens of largest standard deviation of attention and, of the others, those of largest mean."""

    statistics = (AttentionSum(), AttentionSquareSum())
    scope = "head"

    protected: int | None = None  # tokens; 3/10 of the capacity, rounded down, and 1 when None
    window: int = 10  # newest tokens, which are protected before all others

    def bind(self, capacity: int) -> Self:
        """Resolve the number of protected tokens, at most the capacity."""
        protected = int(0.3 * capacity) + 1 if self.protected is None else self.protected
        if not 0 <= protected <= capacity or self.window < 0:
            raise ValueError(f"capacity {capacity} can't hold {protected} protected tokens, of which window {self.window}")
        return replace(self, protected=protected)

    def importance(self, view: CacheView) -> Tensor:
        """Mean attention since the token was cached; protected tokens are never evicted. [B, H, S] float32."""
        assert self.protected is not None, "bind first"
        steps = view.age + 1
        mean = view.state(AttentionSum()) / steps
        variance = view.state(AttentionSquareSum()) / steps - mean * mean
        variance = variance.masked_fill(view.age < self.window, inf).masked_fill(~view.valid, -inf)
        place = view.by_slot(view.by_rank(variance).argsort(dim=-1, stable=True).argsort(-1))
        return mean.masked_fill(place >= view.rank.shape[-1] - self.protected, inf).masked_fill(~view.valid, 0)
