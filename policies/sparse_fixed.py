"""The fixed pattern of the Sparse Transformer: the query's own block, and the last tokens of every earlier block.

Source: Child et al. 2019, arXiv:1904.10509, Section 4.3. The rule was read in openai/sparse_attention c53f3bd, attention.py
(`get_blocksparse_obj`).
Differs: the published pattern keeps all summaries, so its cache grows by summary / block per token; here the oldest summary
    tokens are evicted when the capacity is reached. A capacity of block + all summaries is the published pattern. All heads have
    the same summary; in the code, heads can take turns with `num_verts` parts of the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class SparseFixed(Policy):
    """Keep the block of `block` positions that the newest token is in, and the last `summary` positions of earlier blocks."""

    block: int | None = None  # tokens; half the capacity when None. The paper has 128
    summary: int | None = None  # tokens; a sixteenth of the block, at least 1, when None. The paper has 8 to 32

    def bind(self, capacity: int) -> Self:
        """Resolve the block, which the capacity must hold, and the summary."""
        block = max(1, capacity // 2) if self.block is None else self.block
        summary = max(1, block // 16) if self.summary is None else self.summary
        if not 0 < summary <= block <= capacity:
            raise ValueError(f"capacity {capacity} can't hold block {block} with summary {summary} of at least 1")
        return replace(self, block=block, summary=summary)

    def importance(self, view: CacheView) -> Tensor:
        """2 in the newest token's block, 1 in a summary, else 0; of equal tokens, the oldest goes. [B, H, S] float32."""
        assert self.block is not None, "bind first"
        assert self.summary is not None, "bind first"
        summary = _remainder(view.position, self.block) >= self.block - self.summary
        own = view.position >= view.step - _remainder(view.step, self.block)
        return torch.where(own, 2.0, summary.float())


def _remainder(position: Tensor, block: int) -> Tensor:
    """`position % block`, from operations that compiled loops have. Exact below 2^24."""
    rest = position - (position.float() * (1 / block)).long() * block  # rounding may be one block off
    return rest + (rest < 0).long() * block - (rest >= block).long() * block
