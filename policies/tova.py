"""TOVA: keep the tokens that the newest query attends to most. A layer's heads all keep the same tokens.

Source: Oren et al. 2024, arXiv:2401.06104, Section 3.2; the authors' code schwartz-lab-NLP/TOVA 9c7d09b, src/tova_cache.py, has
the same rule.
Differs: `variant: kvpress` never evicts the newest token (NVIDIA/kvpress 8bb29b9, presses/tova_press.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistics import RecentAttention
from kvbench.policies.view import CacheView

_LAST = RecentAttention(1)


@dataclass(frozen=True)
class Tova(Policy):
    """Evict the token with the least attention from the newest query, averaged over all query heads of the layer."""

    statistics = (_LAST,)
    scope = "layer"

    variant: Literal["paper", "kvpress"] = "paper"

    def importance(self, view: CacheView) -> Tensor:
        """The newest query's softmax weights, averaged over the heads of the layer. [B, H, S] float32.

        A head's slots may hold the tokens in another order, so the average is over tokens of the same rank.
        """
        weights = view.by_rank(view.state(_LAST)[..., 0]).mean(1, keepdim=True)
        importance = view.by_slot(weights.expand(view.rank.shape))
        return importance.masked_fill(view.age < 1, inf) if self.variant == "kvpress" else importance
