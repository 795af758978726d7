"""Sink + window (StreamingLLM): keep the first tokens of the stream, which act as attention sinks, and a recent window.

Source: Xiao et al. 2023, arXiv:2309.17453, Section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class SinkWindow(Policy):
    """Keep the first `sinks` tokens of the stream and the `window` newest."""

    sinks: int = 4  # tokens
    window: int | None = None  # tokens; capacity - sinks when None

    def bind(self, capacity: int) -> Self:
        """Resolve the window, which needs at least one token."""
        window = capacity - self.sinks if self.window is None else self.window
        if self.sinks < 0 or window < 1 or self.sinks + window != capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + window {self.window or 'of at least 1'}")
        return replace(self, window=window)

    def band(self, capacity: int) -> tuple[int, int]:
        """The sinks, and the rest of the capacity as the window."""
        return self.sinks, capacity - self.sinks

    def importance(self, view: CacheView) -> Tensor:
        """Newer tokens are more important; the sinks are never evicted. [B, H, S] float32."""
        return view.position.float().masked_fill(view.position < self.sinks, inf)
