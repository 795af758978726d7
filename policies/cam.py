"""CaM: an evicted token's value is spread over the tokens that follow it, with a probability that grows with its attention.

Source: Zhang et al. 2024, Cache Merging, ICML 2024 (openreview LCTmppB165). The rule was read in zyxxmu/cam,
cam_hf/utils_hh/modify_llama_cam.py (`local_cam_mask`), and in NVIDIA/kvpress 8bb29b9, presses/cam_press.py.
Differs: `kvpress`: a token's attention is summed since it was cached, and compared with the mean of the tokens that take its
    value. kvpress evicts the same tokens in all heads, and merges at most as many as were read since the last eviction; here each
    head evicts its own (`evict: {every: b}` evicts in bursts), and all of them merge. `official`: this step's attention is
    compared with the mean of all newer tokens, and the divisor is `spread` even where fewer tokens follow. The authors merge a
    token's value one step before the token leaves; here, when it leaves. In both, a KV head sums its query group, the coin is
    `view.uniform()`, and a prompt that is cut once is dropped, as in both codes. KVCache-Factory c97f9d7 has a third rule under
    this name, which is not here: it merges values of a prompt that stay as well as those that go, and compares with the largest
    attention, not with the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

from kvbench.policies.merges import Evicted, Merged, Merging
from kvbench.policies.policy import Policy
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.statistic import Statistic
from kvbench.policies.statistics import AttentionSum, RecentAttention
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class CaM(Merging):
    """Evict what `score` evicts, and give its value to the `spread` kept tokens after it."""

    score: Policy = field(default_factory=SinkWindow)
    spread: int = 32  # tokens
    variant: Literal["kvpress", "official"] = "kvpress"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of `score`, and the attention that decides whether a value is merged."""
        return tuple(dict.fromkeys((*self.score.statistics, self._attention)))

    @property
    def _attention(self) -> Statistic:
        return AttentionSum() if self.variant == "kvpress" else RecentAttention(1)

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside and check `spread`."""
        if self.spread < 1:
            raise ValueError(f"spread {self.spread} is below 1")
        return super().bind(capacity)

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        """Add a part of each evicted value to the values of the kept tokens that follow it."""
        if evicted.slots.shape[-1] == view.rank.shape[-1]:  # a whole prompt
            return Merged(view.values)
        received = view.state(self._attention).view(view.rank.shape)
        place = view.by_slot(view.by_rank(evicted.kept.long()).cumsum(-1)) - 1  # among kept tokens, of a kept one
        behind = place[:, :, None] - evicted.take(place)[..., None]  # from 1 on for the kept tokens after it. [B, H, E, S]
        newer = evicted.kept[:, :, None] & (behind > 0)
        takes = (newer & (behind <= self.spread)).to(received)
        compared = takes if self.variant == "kvpress" else newer.to(received)
        mean = (compared @ received[..., None]).squeeze(-1) / compared.sum(-1)
        given = evicted.take(received)
        merges = evicted.real & (evicted.take(view.uniform()) * mean < given)
        parts = takes.sum(-1).clamp(min=1) if self.variant == "kvpress" else self.spread
        weights = takes * (merges / parts)[..., None]
        added = weights.transpose(-1, -2).to(view.values.dtype) @ evicted.take(view.values)
        return Merged(view.values + added)
