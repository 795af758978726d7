"""BigBird's pattern with one random set for all queries: first tokens, a recent window, and random tokens.

Source: Zaheer et al. 2020, arXiv:2007.14062, Section 2.
Differs: the paper draws other random blocks for every block of queries, so no token could ever be evicted. Here evicted tokens
    stay evicted: all later queries share one random sample of the past. The unit is a token, drawn per layer and KV head, where
    the paper has blocks of 64 and query heads. A decoder sees no later tokens. Half of the tokens beside the sinks is random by
    default, as in the paper's base model (2 global, 3 window and 3 random blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class BigBirdStatic(Policy):
    """Keep the first `sinks` tokens, the `window` newest, and a uniform sample of those between."""

    sinks: int = 4  # tokens
    window: int | None = None  # tokens; half of the capacity that the sinks leave when None

    def bind(self, capacity: int) -> Self:
        """Resolve the window. The sample gets the remaining capacity, at least one token."""
        window = (capacity - self.sinks) // 2 if self.window is None else self.window
        if self.sinks < 0 or window < 0 or self.sinks + window >= capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + window {window} + at least 1 random token")
        return replace(self, window=window)

    def importance(self, view: CacheView) -> Tensor:
        """The token's random number; sinks and window are never evicted. [B, H, S] float32."""
        assert self.window is not None, "bind first"
        return view.uniform().masked_fill((view.position < self.sinks) | (view.age < self.window), inf)
