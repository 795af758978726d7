"""Running statistics of cached tokens: small, pure update rules that a policy declares.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from policies.policy import CacheView


class Statistic(ABC):
    """A number (or a tensor of shape `shape`) kept for every slot, reset to `initial` when the slot takes a new token."""

    shape: ClassVar[tuple[int, ...]] = ()  # the axes *k
    initial: ClassVar[float] = 0.0

    @staticmethod
    @abstractmethod
    def update(state: Tensor, attention: Tensor, view: CacheView) -> Tensor:
        """Return the state after one step, as a new tensor.

        Args:
            state: before the step. [B, H, S, *k] float32.
            attention: softmax weights of this step's queries; 0 in empty slots. [B, H, G, S] float32.
            view: the cache, with the new token in it.
        """


class AttentionSum(Statistic):
    """Attention a token has received since it was cached: softmax weights summed over steps and the query group.

    Source: Zhang et al. 2023, arXiv:2306.14048, Algorithm 1 (the accumulated score).
    """

    @staticmethod
    def update(state: Tensor, attention: Tensor, view: CacheView) -> Tensor:
        """Add the group's attention at this step. [B, H, S] float32."""
        return state + attention.sum(2)
