"""Window: keep only the most recent tokens.

Source: the "window attention" baseline of Xiao et al. 2023, arXiv:2309.17453, Fig. 1(b).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Window(Policy):
    """Keep the `capacity` newest tokens."""

    def band(self, capacity: int) -> tuple[int, int]:
        """No sinks; the whole capacity is the window."""
        return 0, capacity

    def importance(self, view: CacheView) -> Tensor:
        """Newer tokens are more important. [B, H, S] float32."""
        return view.position.float()
