"""Scissorhands: evict the tokens that most often received less than the average attention.

Source: Liu et al. 2023, arXiv:2305.17118, Algorithm 2. The defaults (a history of 400 steps, 10 recent tokens) are the paper's,
as AnswerDotAI/cold-compress 15bb300, cache.py, gives them; the authors published no code.
Differs: the history is counted in `buckets`, so more than `history - history / buckets` steps count, and at most `history`; with
as many buckets as steps it is exact. The average is 1 / tokens held, where the paper has 1 / t. A KV head's weight is the mean
over its query group (the paper has no GQA). The paper evicts half the capacity at once: that is the cell's `evict: {every: ...}`.
It also gives later layers more capacity; here all have the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistic import Attention, HeadSizes, Statistic
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class LowAttentionCount(Statistic):
    """At how many recent steps a token got less than the average attention: a count per `history / buckets` steps.

    A bucket is emptied when its turn comes again. [B, H, S, buckets].
    """

    history: int  # steps
    buckets: int
    threshold: float  # in units of the average attention

    @property
    def last(self) -> int:
        """The history."""
        return self.history

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """One count per bucket."""
        return (self.buckets,)

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Count this step in the newest bucket. [B, H, S, buckets] float32."""
        steps = self.history // self.buckets
        low = (attention.weights.mean(2) * view.count < self.threshold).float()
        newest = torch.arange(self.buckets, device=state.device) == (view.step // steps % self.buckets)[..., None]
        kept = state.masked_fill((view.step % steps == 0)[..., None], 0)
        return torch.where(newest, kept + low[..., None], state)


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Keep the `window` newest tokens and, of the older ones, those that were below the average attention least often."""

    window: int | None = None  # tokens; 10 when None, but at most half the capacity
    history: int = 400  # steps
    buckets: int = 8
    threshold: float = 1.0  # in units of the average attention

    @property
    def statistics(self) -> tuple[LowAttentionCount]:
        """Counts of low attention."""
        return (LowAttentionCount(self.history, self.buckets, self.threshold),)

    def bind(self, capacity: int) -> Self:
        """Resolve the window. The older tokens get the remaining capacity, at least one token."""
        window = min(10, capacity // 2) if self.window is None else self.window
        if not 0 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {window} + at least 1 older token")
        if self.buckets < 1 or self.history < 1 or self.history % self.buckets:
            raise ValueError(f"history {self.history} is not a positive multiple of buckets {self.buckets}")
        return replace(self, window=window)

    def importance(self, view: CacheView) -> Tensor:
        """Minus the count of steps with low attention; tokens in the window are never evicted. [B, H, S] float32."""
        assert self.window is not None, "bind first"
        return (-view.state(self.statistics[0]).sum(-1)).masked_fill(view.age < self.window, inf)
