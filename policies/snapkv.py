"""SnapKV: keep the tokens with the most attention from a window of the newest queries, pooled over neighbouring tokens.

Source: Li et al. 2024, arXiv:2404.14469, Section 4 and Listing 1; the authors' code FasterDecoding/SnapKV e216ddc,
snapkv/monkeypatch/snapkv_utils.py. Their LongBench settings (experiments/LongBench/config) are the defaults of `paper` and
`official`; their class without settings has kernel 5 and averages.
Differs: a KV head's scores are the sum over its query group, or the maximum with `group: max`, before pooling. The authors keep a
selection for every query head; kvpress averages after pooling, which ranks alike, since its pooling is an average (NVIDIA/kvpress
8bb29b9, presses/snapkv_press.py). While decoding, the rule is applied at every eviction; the authors apply it once, after the
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal, Self

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvbench.policies.policy import Policy
from kvbench.policies.statistics import Recent, RecentAttention, RecentAttentionByQueryHead
from kvbench.policies.view import CacheView

Pool = Literal["avg", "max"]
_DEFAULTS: dict[str, tuple[int, int, Pool]] = {
    "paper": (32, 7, "max"), "official": (32, 7, "max"), "kvpress": (64, 5, "avg"),
}  # window, kernel, pool  # fmt: skip


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep the `window` newest tokens and, of the older ones, those whose neighbourhood the window's queries attend to most."""

    scope = "head"

    variant: Literal["paper", "official", "kvpress"] = "paper"  # sets the defaults of the next three
    window: int | None = None  # tokens; 32 (kvpress: 64) when None, but at most half the capacity
    kernel: int | None = None  # tokens, odd; 7 (kvpress: 5) when None
    pool: Pool | None = None  # max (kvpress: avg) when None
    group: Literal["sum", "max"] = "sum"  # over the query heads of a KV head

    @property
    def statistics(self) -> tuple[Recent]:
        """The attention of the window's queries."""
        window = self.window or _DEFAULTS[self.variant][0]
        return (RecentAttention(window) if self.group == "sum" else RecentAttentionByQueryHead(window),)

    def bind(self, capacity: int) -> Self:
        """Resolve the window, kernel and pooling. The older tokens get the remaining capacity, at least one token."""
        window, kernel, pool = _DEFAULTS[self.variant]
        window = max(1, min(window, capacity // 2)) if self.window is None else self.window
        kernel = kernel if self.kernel is None else self.kernel
        if not 1 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {window} + at least 1 older token; the window is at least 1")
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel {kernel} is not a positive odd number")
        return replace(self, window=window, kernel=kernel, pool=self.pool or pool)

    def importance(self, view: CacheView) -> Tensor:
        """Pooled attention from the window's queries; tokens in the window are never evicted. [B, H, S] float32."""
        assert self.window is not None, "bind first"
        assert self.kernel is not None, "bind first"
        assert self.pool is not None, "bind first"
        received = view.state(self.statistics[0]).sum(-1)
        received = received if self.group == "sum" else received.amax(-1)
        in_window = view.age < self.window
        older = view.by_rank(received.masked_fill(in_window | ~view.valid, 0))
        return view.by_slot(pooled(older, self.kernel, self.pool)).masked_fill(in_window, inf)


def pooled(x: Tensor, kernel: int, pool: Pool) -> Tensor:
    """The average or maximum of `kernel` neighbours, with zeros beyond both ends. [B, H, S] >= 0 -> the same."""
    return (avg_pool1d if pool == "avg" else max_pool1d)(x, kernel, 1, kernel // 2)
