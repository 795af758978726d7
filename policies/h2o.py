"""H2O: keep the heavy hitters and a recent window.

Source: Zhang et al. 2023, arXiv:2306.14048, Algorithm 1.
Differs: a KV head's attention mass is summed over its query group (the paper has no GQA). `normalise` divides that mass, which
favours tokens that have been cached for long: `visible` by the number of queries that could see the token, as kvpress'
observed attention does (NVIDIA/kvpress 8bb29b9, presses/observed_attention_press.py; it has no window: set `window: 0`); `age`
by the number of steps since the token was cached, at least 1, where a prompt's tokens count as cached at its end
(awslabs/keys_values a34f07d, kvcache/h2o.py, `normalize_scores`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, Self

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistics import AttentionSum
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the `window` newest tokens and, of the older ones, those with the most attention so far."""

    statistics = (AttentionSum(),)

    window: int | None = None  # tokens; half the capacity when None
    normalise: Literal["none", "age", "visible"] = field(default="none", metadata={"added": True})

    def bind(self, capacity: int) -> Self:
        """Resolve the window. The heavy hitters get the remaining capacity, at least one token."""
        window = capacity // 2 if self.window is None else self.window
        if not 0 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {window} + at least 1 heavy hitter")
        return replace(self, window=window)

    def importance(self, view: CacheView) -> Tensor:
        """Attention received since the token was cached; tokens in the window are never evicted. [B, H, S] float32."""
        assert self.window is not None, "bind first"
        received = view.state(AttentionSum())
        if self.normalise == "visible":
            received = received / (view.age + 1)
        elif self.normalise == "age":
            received = received / (view.step + 1 - view.position.maximum(view.prompt - 1)).clamp(min=1)
        return received.masked_fill(view.age < self.window, inf)
