"""CaM: an evicted token's value is spread over the tokens that follow it, with a probability that grows with its attention.

Source: Zhang et al. 2024, Cache Merging, ICML 2024 (openreview LCTmppB165). The rules were read in zyxxmu/cam,
cam_hf/utils_hh/modify_llama_cam.py (`local_cam_mask`), in NVIDIA/kvpress 8bb29b9, presses/cam_press.py, and in
Zefan-Cai/KVCache-Factory c97f9d7, pyramidkv/pyramidkv_utils.py (`CAMKVCluster`): three rules under one name.
Differs: `kvpress`: a token's attention is summed since it was cached, and compared with the mean of the tokens that take its
    value. kvpress evicts the same tokens in all heads, and merges at most as many as were read since the last eviction; here each
    head evicts its own (`evict: {every: b}` evicts in bursts), and all of them merge. `official`: this step's attention is
    compared with the mean of all newer tokens, and the divisor is `spread` even where fewer tokens follow. The authors merge a
    token's value one step before the token leaves; here, when it leaves. Their variant for endless streams is left out. In both,
    a prompt that is cut once is dropped, as in both codes. `kvcache_factory`: only a prompt that is cut once is merged, and
    values of tokens that stay, too; the attention of the newest `spread` queries is compared with its maximum. Their `score` is
    `{name: snapkv, window: 32, kernel: 1}`. In all, a KV head sums its query group, and the coin is `view.uniform()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

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
    variant: Literal["kvpress", "official", "kvcache_factory"] = "kvpress"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of `score`, and the attention that decides whether a value is merged."""
        return tuple(dict.fromkeys((*self.score.statistics, self._attention)))

    @property
    def _attention(self) -> Statistic:
        if self.variant == "kvpress":
            return AttentionSum()
        return RecentAttention(1 if self.variant == "official" else self.spread)

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside and check `spread`."""
        if self.spread < 1:
            raise ValueError(f"spread {self.spread} is below 1")
        return super().bind(capacity)

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        """Add a part of each evicted value to the values of the kept tokens that follow it."""
        is_prompt = evicted.slots.shape[-1] == view.rank.shape[-1]
        if self.variant == "kvcache_factory":
            return Merged(self._passed_on(view) if is_prompt else view.values)
        if is_prompt:
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

    def _passed_on(self, view: CacheView) -> Tensor:
        """Values of a prompt, once each token in turn, oldest first, has given a part of its value to the next. [B, H, S, Dv].

        The first tenth of the prompt and its last `spread` tokens give nothing.
        """
        received = view.by_rank(view.state(self._attention).sum(-1).masked_fill(~view.valid, 0))
        place = torch.arange(received.shape[-1], device=received.device)
        opening = place < torch.ceil(0.1 * view.count.double())
        following = max_pool1d(pad(received, (0, self.spread - 1)), self.spread, 1)  # a token's own attention included
        largest = received.masked_fill(~opening, 0).amax(-1, keepdim=True).maximum(following)
        gives = ~opening & (place < view.count - self.spread) & (view.by_rank(view.uniform()) * largest < received)
        values = view.by_rank(view.values.to(torch.promote_types(view.values.dtype, torch.float32)))
        parts = (gives / self.spread)[..., None]
        for giver in range(values.shape[2] - self.spread):
            takers = slice(giver + 1, giver + 1 + self.spread)
            values[:, :, takers] += parts[:, :, giver, None] * values[:, :, giver, None]
        return view.by_slot(values).to(view.values.dtype)
