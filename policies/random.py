"""Random: the control. A policy that does no better gains nothing from choosing its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Random(Policy):
    """Keep a uniform sample of the whole stream, drawn per layer and KV head.

    Every token has one random number, and the lowest is evicted. This is reservoir sampling (Vitter 1985): every past token
    is equally likely to be in the cache.
    """

    def importance(self, view: CacheView) -> Tensor:
        """The token's random number. [B, H, S] float32."""
        return view.uniform()
