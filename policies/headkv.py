"""HeadKV: heads of higher retrieval importance keep more tokens.

Source: Fu et al. 2024, arXiv:2410.19258, Section 3.2. The rule was read in FYYFU/HeadKV 0862a09, headkv/snapkv_utils.py
(`ReasonSnapKVCluster`), and Zefan-Cai/KVCache-Factory c97f9d7, run_longbench.py and pyramidkv/pyramidkv_utils.py
(`HeadKVCluster`).
Differs: budgets are rounded so that the total is that of the capacity; both codes round every head by itself. Tables per query
    head are averaged over the query heads of a KV head, as KVCache-Factory does (HeadKV caches per query head). Neither of its
    tables is shipped: name a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from kvbench.policies.policy import Composed, Policy
from kvbench.policies.shares import integer_shares, window_of
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.tables import read_importance, sha256_of


@dataclass(frozen=True)
class HeadKV(Composed):
    """Keep the tokens with the highest importance by `score`; a head's budget grows with its importance in a table."""

    score: Policy = field(default=SnapKV())
    file: str = field(kw_only=True)  # JSON with {"importance": [[...], ...]}, a number for every head of every layer
    sha256: str | None = None  # of the file; `bind` fills it in, so that a record says which table it was
    beta: float = 1.01  # heads share 1 / beta of the capacity by importance, apart from the window; the rest is the same for all
    temperature: float = 1.0  # exponent of the importances
    window: int | None = None  # tokens that every head keeps apart from its share; the window of `score` when None

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside and resolve the window."""
        score = self.score.bind(capacity)
        window = window_of(score) if self.window is None else self.window
        if self.beta < 1:
            raise ValueError(f"beta {self.beta} is below 1")
        if not 0 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {window} + at least 1 token to share")
        return replace(self, score=score, window=window, sha256=sha256_of(self.file, self.sha256))

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> list[list[int]]:
        """A part for every head, and a part in proportion to importance. L lists of H integers."""
        assert self.window is not None, "bind first"
        importance = read_importance(self.file, layers, heads).pow(self.temperature)
        if not importance.any():
            raise ValueError(f"{self.file}: all importances are 0")
        base = capacity - self.window
        pooled = base // self.beta  # tokens a head, on average
        shares = capacity - pooled + importance / importance.sum() * pooled * importance.numel()
        return integer_shares(shares.flatten(), importance.numel() * capacity, self.window + 1).view(layers, heads).tolist()
