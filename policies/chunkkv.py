"""ChunkKV: another policy's scores, averaged over chunks of consecutive tokens, so that whole chunks are kept.

Source: Liu et al. 2025, arXiv:2502.00299, Section 3; NVIDIA/kvpress 8bb29b9, presses/chunkkv_press.py.
Differs: the capacity is always filled, so the last chunk may be kept in part, its newest tokens; kvpress keeps whole chunks and
fewer tokens. The paper's reuse of one layer's choice in the next layers is left out. Tokens that `score` never evicts (SnapKV's
window) are never evicted, and are left out of a chunk's average; `variant: kvpress` counts such tokens as the layer's largest
score + 1, and averages all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.policies.policy import Composed, Policy
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class ChunkKV(Composed):
    """Keep the chunks with the highest average score, summed over the heads of the layer. All heads keep the same chunks."""

    scope = "layer"

    score: Policy = field(default_factory=SnapKV)
    chunk: int | None = None  # tokens; 10 (kvpress: 20) when None
    variant: Literal["paper", "kvpress"] = "paper"

    def bind(self, capacity: int) -> Self:
        """Resolve the chunk and bind the policy inside."""
        chunk = {"paper": 10, "kvpress": 20}[self.variant] if self.chunk is None else self.chunk
        if chunk < 1:
            raise ValueError(f"chunk {chunk} is below 1")
        return replace(super().bind(capacity), chunk=chunk)

    def importance(self, view: CacheView) -> Tensor:
        """The score of the token's chunk. [B, H, S] float32."""
        score = self.score.importance(view)
        protected = (score == inf) & view.valid
        counted = view.valid & ~protected
        if self.variant == "kvpress":
            top = score.masked_fill(~counted, -inf).amax((1, 2), keepdim=True) + 1
            score, counted, protected = score.where(~protected, top), view.valid, torch.zeros_like(protected)
        return self._of_chunk(score.masked_fill(~counted, 0), counted.to(score), view).masked_fill(protected, inf)

    def _of_chunk(self, score: Tensor, counted: Tensor, view: CacheView) -> Tensor:
        """Averages over the counted tokens of each chunk, summed over heads. score: 0 where not counted. [B, H, S]."""
        assert self.chunk is not None, "bind first"
        position = view.by_rank(view.position.masked_fill(~view.valid, -1))
        number = position // self.chunk
        number = pad((number[..., 1:] != number[..., :-1]).long().cumsum(-1), (1, 0))  # of the chunks that are left
        place = number * self.chunk + position % self.chunk
        table = score.new_zeros(*score.shape[:2], score.shape[2] * self.chunk)
        totals, tokens = (
            table.scatter(-1, place, view.by_rank(x)).unflatten(-1, (-1, self.chunk)).sum(-1) for x in (score, counted)
        )
        average = (totals / tokens.clamp(min=1)).sum(1, keepdim=True)
        return view.by_slot(average.expand(score.shape).gather(-1, number))
