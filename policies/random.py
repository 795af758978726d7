"""Random: the control. Whatever a policy gains over it comes from choosing well, not from the budget."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.policy import CacheView, Policy


@dataclass(frozen=True)
class Random(Policy):
    """Keep a uniform sample of the whole stream, drawn per layer and KV head.

    Every token gets one random number when it comes and the lowest is evicted (reservoir sampling:
    Vitter 1985), so that each token of the past is as likely to be held as any other.
    """

    def importance(self, view: CacheView) -> Tensor:
        """The token's random number. [B, H, S] float32."""
        return view.uniform()
