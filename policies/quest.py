"""Quest: read the pages whose keys may have the largest dot products with the query.

Source: Tang et al. 2024, arXiv:2406.10774, Algorithm 1. The rule was read in mit-han-lab/Quest, evaluation/quest_attention.py.
Differs: the bound of the newest page covers the tokens up to the query, and pages are also selected while a prompt or text is
    read. The code reads inputs of more than one token under full attention (here: `evict: prompt`). Query heads choose for
    themselves, as in the code; the query heads of a KV head then read the union of their pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.selects import Queries, Selecting


@dataclass(frozen=True)
class Quest(Selecting):
    """Read `budget` tokens per query head in whole pages, at least three pages; everything in the first layers."""

    budget: int = 256  # tokens
    page: int = 16  # tokens
    dense_layers: int = 2  # first layers whose queries read everything

    def __post_init__(self) -> None:
        if min(self.budget, self.page) < 1 or self.dense_layers < 0:
            raise ValueError(f"budget {self.budget} and page {self.page} must be at least 1, dense_layers {self.dense_layers} 0")

    def select(self, queries: Queries) -> Tensor | None:
        """Slots of the pages with the largest bounds. [B, H, G, T, n] int64."""
        if queries.layer < self.dense_layers:
            return None
        bounds = queries.page_bounds(self.page)
        best = bounds.topk(min(max(3, self.budget // self.page), bounds.shape[-1]), dim=-1).indices
        return queries.slots_of_pages(best, self.page)
