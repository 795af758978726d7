"""LagKV: keep the tokens that stand out from the tokens that follow them.

Source: Liang et al. 2025, arXiv:2504.04704, Section 3. Read in NVIDIA/kvpress 8bb29b9, `presses/lagkv_press.py`: the rule here.
Differs: partitions follow the order of the tokens held, so that the rule can be applied again after an eviction; the paper
compresses every partition once. Tokens of the same place in different partitions tie, as do all those that are always kept. The
older one is evicted first, and the sinks last; kvpress leaves the order open. A channel that is constant in the next partition
counts as 0; in kvpress it gives NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class LagKV(Policy):
    """Keep the sinks, the last full partition and what follows it, and of every earlier partition the most distinct tokens.

    A token is distinct if its channels, scaled by their range in the next partition, differ much from each other.
    """

    scope = "head"

    sinks: int = 4  # tokens that open the stream
    lag: int = 128  # tokens of a partition
    keys: Literal["rotated", "unrotated"] = "rotated"  # to their positions in the stream, or before RoPE

    def bind(self, capacity: int) -> Self:
        """The sinks leave room for at least one other token."""
        if self.lag < 1:
            raise ValueError(f"lag {self.lag} is below 1")
        if not 0 <= self.sinks < capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + at least 1 other token")
        return self

    def importance(self, view: CacheView) -> Tensor:
        """The token's place in its partition, 0 to 1; 1 if it is always kept, 2 for a sink. [B, H, S] float32."""
        slots, lag = view.rank.shape[-1], self.lag
        worth = (view.rank < self.sinks).float() + 1
        scored = max(0, -(-(slots - self.sinks) // lag) - 1)  # partitions that have another after them
        if not scored:
            return worth
        keys = view.rotated_keys if self.keys == "rotated" else view.keys
        scores = self._distinctness(view.by_rank(keys)) + self._distinctness(view.by_rank(view.values))
        places = scores.argsort(dim=-1, stable=True).argsort(-1) / lag
        ends = self.sinks + lag * torch.arange(2, scored + 2, device=worth.device)[:, None]  # of the next partition
        places = torch.where(ends <= view.count[..., None], places, 1.0).flatten(2)
        rest = slots - self.sinks - places.shape[-1]
        return torch.where(worth > 1, worth, view.by_slot(functional.pad(places, (self.sinks, rest), value=1.0)))

    def _distinctness(self, x: Tensor) -> Tensor:
        """Scores of the tokens of all partitions but the last. [B, H, S, D] in order of rank -> [B, H, P - 1, lag] float32."""
        x = x[:, :, self.sinks :].float()
        x = functional.pad(x, (0, 0, 0, -x.shape[2] % self.lag)).unflatten(2, (-1, self.lag))
        low, high = x[:, :, 1:].amin(-2, keepdim=True), x[:, :, 1:].amax(-2, keepdim=True)
        scaled = torch.where(high > low, (x[:, :, :-1] - low) / (high - low), 0.0)
        return scaled.std(-1).softmax(-1)
