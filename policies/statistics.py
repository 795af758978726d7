"""Running statistics of cached tokens that policies can declare.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots.
"""

from __future__ import annotations

from torch import Tensor

from kvbench.policies.policy import CacheView, Statistic

__all__ = ["AttentionSum", "Statistic"]


class AttentionSum(Statistic):
    """Attention a token has received since it was cached: softmax weights summed over steps and the query group.

    Source: Zhang et al. 2023, arXiv:2306.14048, Algorithm 1 (the accumulated score).
    """

    @staticmethod
    def update(state: Tensor, attention: Tensor, view: CacheView) -> Tensor:
        """Add the group's attention at this step. [B, H, S] float32."""
        return state + attention.sum(2)
