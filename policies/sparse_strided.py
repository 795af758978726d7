"""The strided pattern of the Sparse Transformer: the newest tokens, and every `stride`-th token before.

Source: Child et al. 2019, arXiv:1904.10509, Section 4.3. The rule was read in openai/sparse_attention c53f3bd, attention.py
(`get_attn_mask`, mode strided).
Differs: every head reads both parts of the pattern, the paper's merged head. The kernels of the code round both parts to blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.selects import Queries, Selecting


@dataclass(frozen=True)
class SparseStrided(Selecting):
    """Read the `stride` newest tokens, and those whose distance is a multiple of `stride`."""

    stride: int = 128  # tokens; the paper chooses about the square root of the length

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"stride {self.stride} is below 1")

    def select(self, queries: Queries) -> Tensor:
        """Newest tokens, then every `stride`-th. [B, 1, 1, T, n] int64."""
        far = queries.range(queries.keys.shape[2] // self.stride + 1)[1:] * self.stride
        return queries.steps - torch.cat([queries.range(self.stride), far])
