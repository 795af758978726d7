"""DuoAttention: retrieval heads keep much, streaming heads only sinks and a recent window.

Source: Xiao et al. 2024, arXiv:2410.10819, Sections 2.3 and 2.4. The rule was read in mit-han-lab/duo-attention fe93c31,
duo_attn/utils.py (`sparsify_attention_heads`), and NVIDIA/kvpress 8bb29b9, kvpress/presses/duo_attention_press.py.
Differs: retrieval heads are bounded: they share equally what the streaming heads leave of the total, and keep what `score` says.
    In both codes they keep everything; a capacity at which their share is the whole text gives that. The lowest
    round(sparsity * heads) scores are streaming heads, as in kvpress; the official code cuts at a quantile of the scores, with
    random noise against ties.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch

from kvbench.policies.policy import Composed, Policy
from kvbench.policies.shares import integer_shares
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.tables import read_importance, sha256_of


@dataclass(frozen=True)
class DuoAttention(Composed):
    """Streaming heads keep the first `sinks` and the `recent` newest tokens, retrieval heads what `score` says."""

    score: Policy = field(default=SnapKV())
    file: str = field(kw_only=True)  # JSON with {"importance": [[...], ...]}, high for retrieval heads
    sha256: str | None = None  # of the file; `bind` fills it in, so that a record says which table it was
    sparsity: float = 0.5  # share of all heads that stream
    sinks: int = 64  # tokens
    recent: int = 256  # tokens

    def bind(self, capacity: int) -> Self:
        """Bound to the budget of a streaming head, its tokens are ranked as sink + window ranks them."""
        if not 0 <= self.sparsity <= 1 or self.sinks < 0 or self.recent < 1:
            raise ValueError(f"sparsity {self.sparsity}, sinks {self.sinks}, recent {self.recent}: out of range")
        streams = self.sparsity > 0 and capacity == self.sinks + self.recent
        score = (SinkWindow(self.sinks) if streams else self.score).bind(capacity)
        return replace(self, score=score, sha256=sha256_of(self.file, self.sha256))

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> list[list[int]]:
        """Sinks and window of the streaming heads; equal parts of the rest for the others. L lists of H integers."""
        scores, streams = read_importance(self.file, layers, heads).flatten(), self.sinks + self.recent
        streaming = round(self.sparsity * len(scores))
        retrieval = len(scores) - streaming
        left = len(scores) * capacity - streaming * streams
        if streaming and (left < retrieval * (streams + 1) or (not retrieval and left)):
            raise ValueError(
                f"capacity {capacity} does not leave each of {retrieval} retrieval heads more than a streaming head's "
                f"sinks {self.sinks} + recent {self.recent}"
            )
        budgets = torch.full_like(scores, streams, dtype=torch.int64)
        if retrieval:
            chosen = scores.argsort(stable=True)[streaming:].sort().values
            budgets[chosen] = integer_shares(scores.new_ones(retrieval), left)
        return budgets.view(layers, heads).tolist()
