"""FINCH: keep what the question attends to.

Source: Corallo & Papotti 2024, TACL 12 (10.1162/tacl_a_00716), Section 3; NVIDIA/kvpress 8bb29b9, presses/finch_press.py, which
the authors name as their implementation.
Differs: the prompt is cut once, where the paper reads and cuts it in chunks. The delimiter is a token that the model reads; in
kvpress it is a mark that the model never sees. The paper's rotation to consecutive positions is the position mode:
`{name: finch, positions: cache}`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistic import Attention, Statistic
from kvbench.policies.statistics import Recent, TokenId
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class RecentRelativeAttention(Recent):
    """`RecentAttention` times the number of earlier tokens that the query could see: queries with more to see count the same."""

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Put this step's attention in the place of the oldest. [B, H, S, window] float32."""
        return self.put(state, (attention.weights * (view.count - 1)[..., None]).sum(2), view)


@dataclass(frozen=True)
class Finch(Policy):
    """Keep the question, which ends the prompt, and the tokens that it attends to most."""

    scope = "head"

    window: int | None = None  # tokens of the question, or the most there may be; 32 when None, but at most half the capacity
    delimiter: int | None = None  # id of the token before the question; None: the question has `window` tokens

    @property
    def _attention(self) -> RecentRelativeAttention:
        return RecentRelativeAttention(self.window or 32)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The attention of the window's queries; with a delimiter, the tokens."""
        return (self._attention,) if self.delimiter is None else (self._attention, TokenId())

    def bind(self, capacity: int) -> Self:
        """Resolve the window. The older tokens get the remaining capacity, at least one token."""
        window = max(1, min(32, capacity // 2)) if self.window is None else self.window
        if not 1 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold a question of {window} + at least 1 older token")
        return replace(self, window=window)

    def importance(self, view: CacheView) -> Tensor:
        """Attention from the question; its tokens and the delimiter are never evicted while in the window. [B, H, S] float32."""
        assert self.window is not None, "bind first"
        start = self._delimiter_at(view)
        queries = view.step - (view.step - torch.arange(self.window, device=view.step.device)) % self.window
        received = (view.state(self._attention) * (queries > start)[:, :, None]).sum(-1)
        return received.masked_fill((view.age < self.window) & (view.position >= start), inf)

    def _delimiter_at(self, view: CacheView) -> Tensor:
        """Position of the newest delimiter in the cache; -1 if there is none. [B, H, 1] int64."""
        if self.delimiter is None:
            return torch.full_like(view.count, -1)
        found = view.valid & (view.tokens == self.delimiter)
        return view.position.masked_fill(~found, -1).amax(-1, keepdim=True)
