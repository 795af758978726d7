"""Recompute-window: no cache; for every token, run the last `capacity + 1` tokens through the model again.

Source: "sliding window with re-computation", Xiao et al. 2023, arXiv:2309.17453, Fig. 1(c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class RecomputeWindow(Policy):
    """Recompute the window for every token, so that its keys and values depend on no token outside it: the quality reference."""

    caches: ClassVar[bool] = False

    def importance(self, view: CacheView) -> Tensor:
        """Newer tokens are more important. Unused, since nothing is cached. [B, H, S] float32."""
        return view.position.float()
