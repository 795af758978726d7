"""Random eviction; with `sinks: 4, window: half`, the control that a policy should beat.

Source: `keep_prompt` follows Random Attention, arXiv:2609.03430: keep the prompt, evict the rest uniformly.
Differs: a prompt that exceeds the capacity is sampled, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Random(Policy):
    """Keep a uniform sample of the whole stream, drawn per layer and KV head.

    Every token has one random number, and the lowest is evicted. This is reservoir sampling (Vitter 1985): every past token
    is equally likely to be in the cache.
    """

    # evict from the prompt only when nothing else is left
    keep_prompt: bool = field(default=False, metadata={"added": True})
    sinks: int = field(default=0, metadata={"added": True})  # first tokens of the stream that are never evicted
    # newest tokens that are never evicted; half: half of the capacity
    window: int | Literal["half"] = field(default=0, metadata={"added": True})

    def bind(self, capacity: int) -> Self:
        """Resolve the window and check that sinks and window fit."""
        window = capacity // 2 if self.window == "half" else self.window
        if self.sinks < 0 or window < 0 or self.sinks + window > capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + window {window}")
        return replace(self, window=window)

    def importance(self, view: CacheView) -> Tensor:
        """The token's random number, less 1 if it comes after a prompt to be kept. [B, H, S] float32."""
        importance = view.uniform()
        if self.keep_prompt:  # subtracting 1 is exact, adding it would not be
            importance = torch.where(view.position < view.prompt, importance, importance - 1)
        if self.sinks:
            importance = importance.masked_fill(view.position < self.sinks, inf)
        assert self.window != "half", "bind first"
        return importance.masked_fill(view.age < self.window, inf) if self.window else importance
