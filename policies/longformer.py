"""Longformer's pattern for a decoder: a recent window, and global tokens at chosen positions.

Source: Beltagy et al. 2020, arXiv:2004.05150, Section 3.1.
Differs: only the causal part of the paper's bidirectional pattern. All later tokens attend to global tokens, but global tokens
    don't attend to evicted ones. Dilated windows are in `longformer_dilated`: other queries read their gaps, so it evicts
    nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import or_
from typing import Self

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Longformer(Policy):
    """Keep the tokens at the positions `global_tokens` and the `window` newest of the others."""

    global_tokens: tuple[int, ...] = (0,)  # positions in the stream
    window: int | None = None  # tokens; capacity - global tokens when None

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_tokens", tuple(sorted(set(self.global_tokens))))  # a file gives lists

    def bind(self, capacity: int) -> Self:
        """Resolve the window, which needs at least one token."""
        window = capacity - len(self.global_tokens) if self.window is None else self.window
        if window < 1 or window + len(self.global_tokens) != capacity or min(self.global_tokens, default=0) < 0:
            raise ValueError(
                f"capacity {capacity} can't hold {len(self.global_tokens)} global tokens at positions from 0 "
                f"+ window {self.window or 'of at least 1'}"
            )
        return replace(self, window=window)

    def band(self, capacity: int) -> tuple[int, int] | None:
        """As sink + window if the global tokens are the first of the stream."""
        count = len(self.global_tokens)
        return (count, capacity - count) if self.global_tokens == tuple(range(count)) else None

    def importance(self, view: CacheView) -> Tensor:
        """Newer tokens are more important; global tokens are never evicted. [B, H, S] float32."""
        if not self.global_tokens:
            return view.position.float()
        is_global = reduce(or_, (view.position == p for p in self.global_tokens))
        return view.position.float().masked_fill(is_global, inf)
