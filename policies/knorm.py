"""Knorm: keep the keys with the smallest norm.

Source: Devoto et al. 2024, arXiv:2406.11430, Section 4. Read in NVIDIA/kvpress 8bb29b9, `presses/knorm_press.py`, and in
l2compress, `cache.py`.
Differs: l2compress leaves some layers uncompressed (`skip_layers`), which is not implemented. `sinks` and `window` are additions.
Norms are those of the unrotated keys in float32, which RoPE does not change; kvpress takes them in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Self

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistics import KeyNorm
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Knorm(Policy):
    """Keep the tokens whose keys have the smallest L2 norm."""

    statistics = (KeyNorm(),)

    sinks: int = 0  # tokens that open the stream and are never evicted
    window: int = 0  # newest tokens that are never evicted

    def bind(self, capacity: int) -> Self:
        """The protected tokens leave room for at least one other."""
        if self.sinks < 0 or self.window < 0 or self.sinks + self.window >= capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + window {self.window} + at least 1 other token")
        return self

    def importance(self, view: CacheView) -> Tensor:
        """The norm of the token's key, negated. [B, H, S] float32."""
        protected = (view.position < self.sinks) | (view.age < self.window)
        return (-view.state(KeyNorm())).masked_fill(protected, inf)
