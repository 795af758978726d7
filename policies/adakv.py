"""AdaKV: the heads of a layer share one budget, and a head that holds more of the best scores keeps more tokens.

Source: Feng et al. 2024, arXiv:2407.11550, Algorithm 1 and Section 3.3 (safeguard). The rule was read in FFY0/AdaKV efe4e2e,
adaptive_snapkv/monkeypatch/snapkv_utils.py (`AdaptiveSnapKVCluster`), and NVIDIA/kvpress 8bb29b9, kvpress/presses/adakv_press.py.
Differs: `paper`: budgets are rounded so that a layer keeps its total; the official code rounds every head by itself, and has
    options to weight heads (`normalize`) and to leave out the first layers (`skip`), which are not here. `kvpress`: every head's
    best int(alpha * capacity) tokens are safe, then the lowest scores of all heads go. Its heads still hold every token, and
    attention is masked; ours free the slots. While decoding (`evict: step`), victims are drawn from all heads of a layer, down to
    a floor; neither code evicts then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Self

import torch
from torch import Tensor

from kvbench.policies.policy import Composed, Policy
from kvbench.policies.shares import integer_shares, window_of
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class AdaKV(Composed):
    """Keep the tokens of each layer with the highest importance by `score`; heads share the layer's budget."""

    score: Policy = field(default=SnapKV())
    alpha: float = 0.2  # share of the capacity that every head is sure of
    variant: Literal["paper", "kvpress"] = "paper"

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside and check `alpha`."""
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is not between 0 and 1")
        return super().bind(capacity)

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor:
        """Every head's part of its layer's total. [B, L, H] int64."""
        assert capacity is not None
        return torch.stack([self._of_layer(view, capacity) for view in views], 1)

    def pool_floor(self, capacity: int) -> int:
        """Tokens guaranteed to every head: at least the window of `score`, and 1."""
        return max(int(self.alpha * capacity), window_of(self.score), 1)

    def _of_layer(self, view: CacheView, capacity: int) -> Tensor:
        """Budgets of a layer's heads. [B, H] int64."""
        scores, safe = self.score.importance(view).masked_fill(~view.valid, -inf), int(self.alpha * capacity)
        oldest_first = view.by_rank(scores)  # [B, H, S]
        if self.variant == "kvpress":
            place = oldest_first.argsort(dim=-1, stable=True).argsort(-1)
            oldest_first = oldest_first.masked_fill(place >= place.shape[-1] - safe, inf)
        counts = _best_by_head(oldest_first, capacity)
        if self.variant == "kvpress":
            return counts
        shares = (1 - self.alpha) * counts.double() + self.alpha * capacity
        return integer_shares(shares, scores.shape[1] * capacity, ceiling=view.step.squeeze(-1) + 1)


def _best_by_head(scores: Tensor, capacity: int) -> Tensor:
    """Count each head's tokens among the H * capacity most important of the layer. [B, H, S], oldest first -> [B, H] int64."""
    heads = scores.shape[1]
    pooled = scores.transpose(1, 2).flatten(1)  # of equal tokens, the newest is best, then the last head's
    best = pooled.argsort(dim=-1, stable=True)[:, -heads * capacity :] % heads
    return (best[:, None] == torch.arange(heads, device=scores.device)[:, None]).sum(-1)
