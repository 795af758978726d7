"""R-KV: keep tokens that the newest queries attend to and that no other key resembles.

Source: Cai et al. 2025, arXiv:2505.24133, Section 3; the authors' code Zefan-Cai/R-KV d15c976, rkv/compression/r1_kv.py and
rkv/utils.py. The paper's 128 new tokens between two evictions are the cell's `evict: {every: 128}`.
Differs: attention counts 0.1 in the paper and 0.07 in the code's defaults (`variant: official`). The similarity of each key to
the latest key that it resembles counts as 0, as in the code, which takes the oldest key if it resembles none. The code cuts a
prompt like any other tokens; `keep_prompt` is an addition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.snapkv import pooled
from kvbench.policies.statistic import Attention, Seen
from kvbench.policies.statistics import Recent
from kvbench.policies.view import CacheView

_ROWS = 512  # keys compared with all others at a time


@dataclass(frozen=True)
class RecentLogits(Recent):
    """Logits of each of the `window` newest queries, the largest of the query group: [B, H, S, window]."""

    sees: ClassVar[tuple[Seen, ...]] = ("logits",)
    initial: ClassVar[float] = -inf

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Put this step's logits in the place of the oldest. [B, H, S, window] float32."""
        return self.put(state, attention.logits.amax(2), view)


@dataclass(frozen=True)
class RKV(Policy):
    """Keep the `window` newest tokens and, of the older ones, those that are attended to and not redundant."""

    scope = "head"

    variant: Literal["paper", "official"] = "paper"  # sets the default of `attention`
    window: int | None = None  # tokens; 8 when None, but at most half the capacity
    kernel: int = 7  # tokens, odd, over which attention is pooled
    attention: float | None = None  # what attention counts against redundancy, 0 to 1; 0.1 (official: 0.07) when None
    similar: float = 0.5  # cosine above which two keys resemble each other
    keep_prompt: bool = False  # evict from the prompt only when nothing else is left

    @property
    def statistics(self) -> tuple[RecentLogits]:
        """The logits of the window's queries."""
        return (RecentLogits(self.window or 8),)

    def bind(self, capacity: int) -> Self:
        """Resolve the window. The older tokens get the remaining capacity, at least one token."""
        window = max(1, min(8, capacity // 2)) if self.window is None else self.window
        attention = {"paper": 0.1, "official": 0.07}[self.variant] if self.attention is None else self.attention
        if not 1 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {window} + at least 1 older token; the window is at least 1")
        if self.kernel < 1 or self.kernel % 2 == 0 or not 0 <= attention <= 1:
            raise ValueError(f"kernel {self.kernel} is not a positive odd number, or attention {attention} is not in 0 to 1")
        return replace(self, window=window, attention=attention)

    def importance(self, view: CacheView) -> Tensor:
        """Pooled attention less redundancy; tokens in the window are never evicted. [B, H, S] float32."""
        assert self.window is not None, "bind first"
        assert self.attention is not None, "bind first"
        in_window = view.age < self.window
        logits = view.state(self.statistics[0]).masked_fill((in_window | ~view.valid)[..., None], -inf)
        weights = view.by_rank(logits.softmax(2).nan_to_num().mean(-1))
        worth = self.attention * pooled(weights, self.kernel, "max") - (1 - self.attention) * self._redundancy(view)
        if self.keep_prompt:  # from here on only the order counts, so that nothing is lost in rounding
            in_prompt = view.by_rank(view.position < view.prompt)
            worth = worth.argsort(dim=-1, stable=True).argsort(-1).float() + in_prompt * worth.shape[-1]
        return view.by_slot(worth).masked_fill(in_window, inf)

    def _redundancy(self, view: CacheView) -> Tensor:
        """Softmax of each key's mean cosine with the keys of its head, in order of rank. [B, H, S] float32.

        All pairs are compared, some rows at a time, to save memory.
        """
        valid = view.by_rank(view.valid)
        keys = view.by_rank(view.rotated_keys).float().masked_fill(~valid[..., None], 0)
        keys = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        slots, total = torch.arange(keys.shape[2], device=keys.device).float(), torch.zeros_like(keys[..., 0])
        for number, rows in enumerate(keys.split(_ROWS, 2)):
            cosine = rows @ keys.transpose(-1, -2)
            cosine.diagonal(number * _ROWS, -2, -1).fill_(0)
            latest = ((cosine > self.similar) * slots).amax(-1, keepdim=True)
            total = total + cosine.masked_fill(slots == latest, 0).sum(-2)
        return (total / view.count).masked_fill(~valid, -inf).softmax(-1)
