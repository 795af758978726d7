"""CUR: keep tokens with large keys and values, by an approximation of leverage scores.

Source: Sengupta et al. 2025, arXiv:2509.15038 (CurDKV). Read in NVIDIA/kvpress 8bb29b9, `presses/cur_press.py`: the rule here.
Differs: the paper computes leverage scores; kvpress replaces them by squared norms, each divided by its sum over a local window.
Windows follow the order of the tokens held. kvpress's random projection (`use_random_leverage`) and its global normalisation
(`use_local_approximation` off) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from kvbench.policies.policy import Policy
from kvbench.policies.statistics import KeyNorm, ValueNorm
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class CUR(Policy):
    """Keep the sinks, and the tokens whose squared key and value norms are largest relative to those of neighbouring tokens."""

    scope = "head"
    statistics = (KeyNorm(), ValueNorm())

    sinks: int = 4  # tokens that open the stream and are never evicted
    local: int = 16  # tokens of a neighbourhood
    combine: Literal["product", "mean", "key", "value"] = "product"  # the shares of key and value

    def bind(self, capacity: int) -> Self:
        """The sinks leave room for at least one other token."""
        if self.local < 1:
            raise ValueError(f"local {self.local} is below 1")
        if not 0 <= self.sinks < capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + at least 1 other token")
        return self

    def importance(self, view: CacheView) -> Tensor:
        """The combined share, as a part of the head's total; the sinks are never evicted. [B, H, S] float32."""
        key, value = self._shares(view).unbind(-1)
        shares = {"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[self.combine]
        total = shares.sum(-1, keepdim=True).clamp(min=1e-30)
        return (shares / total).masked_fill(view.position < self.sinks, inf)

    def _shares(self, view: CacheView) -> Tensor:
        """The part of a token's key and value in the squared norms of its neighbourhood. [B, H, S, 2] float32.

        A neighbourhood is `local` tokens in order of rank.
        """
        norms = torch.stack([view.state(KeyNorm()), view.state(ValueNorm())], -1)
        squares = view.by_rank(norms.square().masked_fill(~view.valid[..., None], 0))
        slots = squares.shape[2]
        squares = functional.pad(squares, (0, 0, 0, -slots % self.local)).unflatten(2, (-1, self.local))
        shares = squares / squares.sum(3, keepdim=True).clamp(min=1e-30)
        return view.by_slot(shares.flatten(2, 3)[:, :, :slots])
