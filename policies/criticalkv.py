"""CriticalKV: half the cache by any score, the rest by that score times the norm of the projected value.

Source: Feng et al. 2025, arXiv:2502.03805, Algorithm 1. Read in NVIDIA/kvpress 8bb29b9, `presses/criticalkv_press.py`.
Differs: norms are computed in float32, once, when a token is written. Tokens that `score` never evicts are never evicted.
`epsilon` has the unit of `score`: a score that sums over queries needs a larger one than kvpress's mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.policies.expected_attention import ExpectedAttention
from kvbench.policies.policy import Composed, Policy, Scope
from kvbench.policies.statistic import Seen, Statistic, Written
from kvbench.policies.view import CacheView

_EXPECTED = ExpectedAttention(value_norm=False)  # the projected norm takes the place of the value's own


@dataclass(frozen=True)
class OutputNorm(Statistic):
    """L1 norm of a token's value after the layer's output projection, averaged over the query group."""

    sees: ClassVar[tuple[Seen, ...]] = ()

    def written(self, token: Written) -> Tensor:
        """[*n] float32.

        Raises:
            ValueError: the model has no output projection with a part for every head.
        """
        if token.output is None:
            raise ValueError("criticalkv needs a model whose output projection has a part for every query head")
        by_query_head = [  # one after the other, because E numbers a token take much memory
            torch.einsum("bh...d,hed->bh...e", token.values.float(), output.float()).abs().sum(-1)
            for output in token.output.unbind(1)
        ]
        return torch.stack(by_query_head).mean(0)


@dataclass(frozen=True)
class CriticalKV(Composed):
    """Keep the `first` tokens with the highest score, then those with the highest product of score and projected value's norm."""

    score: Policy = _EXPECTED
    first: int | None = None  # tokens; half the capacity when None
    epsilon: float = 1e-4  # added to the score before it is multiplied

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of `score`, and the norms of projected values."""
        return *self.score.statistics, OutputNorm()

    @property
    def scope(self) -> Scope:
        """The first tokens are found by comparing the slots of a head."""
        return "layer" if self.score.scope == "layer" else "head"

    def bind(self, capacity: int) -> Self:
        """Resolve how many tokens the score alone decides on. At least one is left to the product."""
        first = capacity // 2 if self.first is None else self.first
        if not 0 <= first < capacity:
            raise ValueError(f"capacity {capacity} can't hold first {self.first} + at least 1 other token")
        return replace(super().bind(capacity), first=first)

    def importance(self, view: CacheView) -> Tensor:
        """(score + epsilon) x norm; +inf for the `first` tokens of highest (score, rank). [B, H, S] float32."""
        assert self.first is not None, "bind first"
        score = self.score.importance(view)
        place = view.by_slot(_places(view.by_rank(score.masked_fill(~view.valid, -inf))))
        worth = (score + self.epsilon) * view.state(OutputNorm())
        worth = worth.masked_fill((place >= place.shape[-1] - self.first) | (score == inf), inf)
        return worth.masked_fill(~view.valid, -inf)


def _places(score: Tensor) -> Tensor:
    """Each token's place in order of (score, rank), 0 for the lowest. [B, H, S] in order of rank -> [B, H, S] int64."""
    return score.argsort(dim=-1, stable=True).argsort(-1)
