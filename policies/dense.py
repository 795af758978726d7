"""Dense: keep every token. The reference for every other policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Dense(Policy):
    """Full attention: the cache grows with the stream."""

    evicts: ClassVar[bool] = False

    def importance(self, view: CacheView) -> Tensor:
        """+inf: no token is ever evicted. [B, H, S] float32."""
        return torch.full_like(view.rank, inf, dtype=torch.float32)
