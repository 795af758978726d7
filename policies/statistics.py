"""Statistics that policies name: small pure update rules, one value (or a few) a cached token."""

from __future__ import annotations

from torch import Tensor

from kvbench.policies.policy import CacheView, Statistic

__all__ = ["AttentionSum", "Statistic"]


class AttentionSum(Statistic):
    """Softmax mass received since the token was cached, summed over steps and the query group.

    Source: Zhang et al. 2023, arXiv:2306.14048, Algorithm 1 (the accumulated score).
    """

    @staticmethod
    def update(state: Tensor, attention: Tensor, view: CacheView) -> Tensor:
        """State + the group's mass of this step. [B, H, S] float32."""
        return state + attention.sum(2)
