"""SimLayerKV: layers that attend almost only to sinks and recent tokens keep just those; the other layers keep everything.

Source: Zhang et al. 2024, arXiv:2410.13846, Section 4. The rule was read in sail-sg/SimLayerKV 1fb6bda,
LongBench/SimLayerKV_attention_llama.py and SimLayerKV_llama.py, and NVIDIA/kvpress 8bb29b9, kvpress/presses/simlayerkv_press.py.
Differs: the official code looks at the first generated token, and cuts after it; this looks at the last `queries` of the prompt.
    `kvpress`: the `recent` tokens are those before the last `queries`, and lazy layers keep `recent - queries` newest tokens.
    kvpress averages over a batch; here each stream decides which layers are lazy. Shares are relative to the attention that
    cached tokens received, which is below 1 only with learned or zero sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.statistics import RecentAttention
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class SimLayerKV(Policy):
    """Lazy layers keep the first `sinks` tokens and the `recent` newest; other layers keep the whole prompt.

    Raises:
        ValueError: `sinks` is negative, or `queries` is not between 1 and `recent`.
    """

    outcome = True

    sinks: int = 4  # tokens
    recent: int = 1024  # tokens
    threshold: float = 0.9  # a layer with a larger share of attention is lazy; published: Llama 3 0.9, Llama 2 0.65, Mistral 0.8
    queries: int = 1  # last tokens of the prompt whose attention is looked at
    variant: Literal["paper", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks {self.sinks} must not be negative")
        if not 0 < self.queries <= self.recent:
            raise ValueError(f"queries {self.queries} must be between 1 and recent {self.recent}")

    @property
    def statistics(self) -> tuple[RecentAttention]:
        """Attention of the last queries."""
        return (RecentAttention(self.queries),)

    def importance(self, view: CacheView) -> Tensor:
        """Newer tokens are more important; the sinks are never evicted. [B, H, S] float32."""
        return view.position.float().masked_fill(view.position < self.sinks, inf)

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor:
        """Sinks and recent tokens in lazy layers, the whole prompt in the others. [B, L, H] int64."""
        return torch.stack([self._of_layer(view) for view in views], 1)

    def _of_layer(self, view: CacheView) -> Tensor:
        """[B, H] int64."""
        left_out = self.queries if self.variant == "kvpress" else 0  # newest tokens
        received = view.state(RecentAttention(self.queries)).sum(-1).masked_fill(~view.valid, 0)
        recent = (view.age >= left_out) & (view.age < left_out + self.recent)
        share = (received * ((view.position < self.sinks) | recent)).flatten(1).sum(-1) / received.flatten(1).sum(-1)
        count = view.count.squeeze(-1)
        lazy = (share > self.threshold)[:, None] & (count > self.sinks + self.recent + left_out)
        return torch.where(lazy, self.sinks + self.recent - left_out, count)
