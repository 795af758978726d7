"""CAKE: layers whose attention is spread out, and shifts from query to query, keep more tokens.

Source: Qin et al. 2025, arXiv:2503.12491, Sections 4.1 to 4.3. The rule was read in antgroup/cakekv c4675ce,
cake/model/modify_llama.py, cake/utils.py and cake/cake_cache.py.
Differs: budgets are rounded by largest remainders; the official code rounds down and gives the rest to the first layers. All
    layers are cut at the prompt's end; the official code can cut earlier layers while later ones are still read (cascading), with
    the same result. While decoding, tokens are scored as at the prompt's end; the official code then uses the mean of the newest
    query alone. `tau1` and `tau2` depend on the model there, from 0.5 to 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvbench.policies.policy import Policy
from kvbench.policies.shares import integer_shares
from kvbench.policies.statistics import RecentAttentionByQueryHead
from kvbench.policies.view import CacheView

_NEVER_ZERO = 1e-10  # keeps the logarithm finite


@dataclass(frozen=True)
class Cake(Policy):
    """Keep the window, and the tokens to which its queries attend with a high mean or variance."""

    scope = "head"

    window: int | None = None  # tokens, and queries that are looked at; 32, or half the capacity if that is less
    gamma: float = 200.0  # weight of the variance over queries
    kernel: int = 5  # neighbours whose scores are averaged, itself included; odd
    tau1: float = 1.0  # the larger, the less a layer's entropy matters
    tau2: float = 1.0  # the larger, the less a layer's variance matters

    @property
    def statistics(self) -> tuple[RecentAttentionByQueryHead]:
        """The window's attention."""
        return (RecentAttentionByQueryHead(self.window or 32),)

    def bind(self, capacity: int) -> Self:
        """Resolve the window; one more token is kept at least. A variance needs two queries."""
        window = max(2, min(32, capacity // 2)) if self.window is None else self.window
        if not 2 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {window} of at least 2 + at least 1 token")
        if self.kernel < 1 or self.kernel % 2 == 0 or self.tau1 <= 0 or self.tau2 <= 0:
            raise ValueError(f"kernel {self.kernel} must be odd, tau1 {self.tau1} and tau2 {self.tau2} positive")
        return replace(self, window=window)

    def importance(self, view: CacheView) -> Tensor:
        """Mean + gamma * variance over the window's queries, averaged over neighbours. [B, H, S] float32."""
        assert self.window is not None, "bind first"
        variance, mean = torch.var_mean(view.state(RecentAttentionByQueryHead(self.window)), -1)
        score = (mean + self.gamma * variance).mean(-1).masked_fill(~self._older(view), 0)
        pooled = avg_pool1d(view.by_rank(score), self.kernel, 1, self.kernel // 2)
        return view.by_slot(pooled).masked_fill(view.age < self.window, inf)

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor:
        """The layers' parts of the total, by entropy and variance of their windows' attention. [B, L, H] int64."""
        assert capacity is not None
        assert self.window is not None, "bind first"
        preferences = torch.stack([self._preference(view) for view in views], -1)  # [B, L]
        heads, total = views[0].rank.shape[1], (capacity - self.window) * len(views)
        ceiling = views[0].step.squeeze(-1) + 1 - self.window
        shares = total * preferences / preferences.sum(-1, keepdim=True).clamp(min=1e-300)
        by_layer = integer_shares(shares, total, ceiling=ceiling)
        return (by_layer + self.window)[..., None].expand(-1, -1, heads)

    def _older(self, view: CacheView) -> Tensor:
        """Tokens that are older than the window. [B, H, S] bool."""
        assert self.window is not None, "bind first"
        return view.valid & (view.age >= self.window)

    def _preference(self, view: CacheView) -> Tensor:
        """Return a layer's preference score (Section 4.1). [B] float64."""
        assert self.window is not None, "bind first"
        older = self._older(view)[..., None, None]
        weights = view.state(RecentAttentionByQueryHead(self.window)).masked_fill(~older, 0).double()
        entropy = -(weights * (weights + _NEVER_ZERO).log()).flatten(1).sum(-1)
        variance = weights.var(-1).flatten(1).sum(-1)
        return entropy.clamp(min=0) ** (1 / self.tau1) * variance ** (1 / self.tau2)
