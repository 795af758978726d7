"""Recompute-window: no cache; every token is predicted from its last `capacity + 1` tokens, run afresh.

Source: "sliding window with re-computation", Xiao et al. 2023, arXiv:2309.17453, Fig. 1(c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.policies.policy import CacheView, Policy


@dataclass(frozen=True)
class RecomputeWindow(Policy):
    """The quality yardstick: a window whose keys and values have seen nothing but the window."""

    caches: ClassVar[bool] = False

    def importance(self, view: CacheView) -> Tensor:
        """Not used, since nothing is cached; what is recomputed is the most recent. [B, H, S] float32."""
        return view.position.float()
