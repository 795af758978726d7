"""D2O: an evicted token is merged into the kept token with the most similar key, if it is similar enough.

Source: Wan et al. 2024, arXiv:2406.13035, Section 3. The rule was read in AIoT-MLSys-Lab/D2O 12c99d8,
LLM_merge_new/LMEval_kv_token_merge/modeling_llama3_7b_13b_d2o.py (`D2O_LayerKVCache`) and modeling_llama3_new.py.
Differs: a KV head is one head; the authors expand K and V to query heads. Budgets of a prompt's layers are rounded by largest
    remainders and add up to the capacity, and every layer holds the sinks, the window of `score` and one more token; the authors
    leave the first two layers and the last uncompressed, and clamp shares to at least 0.01. The threshold is per stream.
    `official`: a merged token is the mean of itself and of the evicted tokens, each times its similarity. `paper`: the weights
    are exponentials of the similarity, and e for the kept token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import e, inf
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.policies.h2o import H2O
from kvbench.policies.merges import Evicted, Merged, Merging, Nearest, unrotated
from kvbench.policies.policy import Policy
from kvbench.policies.shares import integer_shares, window_of
from kvbench.policies.statistic import HeadSizes, Seen, Statistic
from kvbench.policies.statistics import AttentionSum
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Threshold(Statistic):
    """Moving average of similarities, of a layer: (threshold, 1 once there is one). [B, H, 2], equal in all heads."""

    sees: ClassVar[tuple[Seen, ...]] = ()
    per: ClassVar[Literal["slot", "head"]] = "head"

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """The threshold, and whether it is known."""
        return (2,)


@dataclass(frozen=True)
class D2O(Merging):
    """Keep heavy hitters, a window and the first tokens; merge evicted tokens whose similarity reaches a moving threshold."""

    merges_keys = True
    scope = "layer"

    score: Policy = field(default_factory=H2O)
    sinks: int = 4  # first tokens of the stream that are never evicted
    beta: float = 0.5  # weight of the newest similarities in the threshold
    variant: Literal["official", "paper"] = "official"

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of `score`, the attention that decides budgets, and the threshold."""
        return tuple(dict.fromkeys((*self.score.statistics, AttentionSum(), Threshold())))

    def bind(self, capacity: int) -> Self:
        """Bind `score`. Check `beta`, and that the capacity holds the sinks and the window of `score`."""
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta {self.beta} must be between 0 and 1")
        bound = super().bind(capacity)
        window = window_of(bound.score)
        if not 0 <= self.sinks <= capacity - window:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + window {window}")
        return bound

    def importance(self, view: CacheView) -> Tensor:
        """Importance that `score` gives; sinks are never evicted. [B, H, S] float32."""
        return self.score.importance(view).masked_fill(view.position < self.sinks, inf)

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor:
        """Layers whose attention is spread evenly over the prompt keep more. [B, L, H] int64."""
        assert capacity is not None
        spread = torch.stack([_evenness(view) for view in views], -1)  # [B, L]
        length, total = views[0].step.squeeze(-1) + 1, capacity * len(views)
        floor = min(self.sinks + window_of(self.score) + 1, capacity)
        by_layer = integer_shares(total * spread.softmax(-1), total, floor=floor, ceiling=length)
        return by_layer[..., None].expand(-1, -1, views[0].rank.shape[1])

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        """Merge keys and values of the evicted tokens whose similarity, averaged over heads, reaches the threshold."""
        nearest = Nearest.of(view, evicted)
        state = view.state(Threshold())
        count = evicted.real.sum((1, 2)).clamp(min=1)
        now = nearest.similarity.double().sum((1, 2)) / count  # [B]
        before, known = state[:, 0].unbind(-1)
        threshold = torch.where(known > 0, (1 - self.beta) * before + self.beta * now, now)
        threshold = torch.where(evicted.real.any((1, 2)), threshold, before)
        similar = nearest.similarity.double().mean(1) >= threshold[:, None]  # [B, E]
        weights = nearest.similarity if self.variant == "official" else nearest.similarity.exp()
        given = (similar[:, None] & evicted.real).to(weights)
        weights = given * weights
        own = 1.0 if self.variant == "official" else e
        number = nearest.total(given)
        total = own + (number if self.variant == "official" else nearest.total(weights))

        def mixed(x: Tensor) -> Tensor:
            return (own * nearest.take(x) + nearest.total(weights[..., None] * evicted.take(x))) / total[..., None]

        changed = number > 0
        values = nearest.put(view.values, mixed(view.values.to(nearest.rotated.dtype)).to(view.values.dtype), changed)
        rotated = mixed(nearest.rotated).to(view.keys.dtype)
        keys = nearest.put(view.keys, unrotated(view.rotate, rotated, nearest.take(view.position)), changed)
        known = known.maximum(evicted.real.any((1, 2)).to(known))
        threshold_state = torch.stack([threshold, known], -1)[:, None].expand_as(state)
        return Merged(values, keys, {Threshold(): threshold_state})


def _evenness(view: CacheView) -> Tensor:
    """Minus the mean over heads of a layer's variance of attention over the prompt, scaled to [0, 1] over heads. [B] float64."""
    received = view.state(AttentionSum()).double().masked_fill(~view.valid, 0)
    mean = received.sum(-1, keepdim=True) / view.count
    variance = ((received - mean) ** 2).masked_fill(~view.valid, 0).sum(-1) / (view.count.squeeze(-1) - 1).clamp(min=1)  # [B, H]
    least, most = variance.amin(-1, keepdim=True), variance.amax(-1, keepdim=True)
    return -((variance - least) / (most - least + 1e-6)).mean(-1)
