"""Longformer's dilated window: every `dilation`-th token in some heads, the newest tokens in others, first tokens in all.

Source: Beltagy et al. 2020, arXiv:2004.05150, Section 3.1.
Differs: the paper's window has two sides, of which a decoder sees one. It dilates two heads of its upper layers; here the heads
    are KV heads, and by default all are dilated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.selects import Queries, Selecting


@dataclass(frozen=True)
class LongformerDilated(Selecting):
    """Read the first `sinks` tokens, and `window` tokens at distances 0, `dilation`, 2 * `dilation` and so on."""

    window: int = 256  # tokens
    dilation: int = 2  # tokens
    sinks: int = 4  # tokens
    heads: int | None = None  # dilated heads of each layer, the first ones; all when None. The window of others has no gaps
    from_layer: int = 0  # first layer with dilated heads

    def __post_init__(self) -> None:
        if min(self.window, self.dilation) < 1 or self.sinks < 0:
            raise ValueError(f"window {self.window} and dilation {self.dilation} must be at least 1, sinks {self.sinks} 0")

    def select(self, queries: Queries) -> Tensor:
        """First tokens, then the window of each head. [B, H, 1, T, n] int64."""
        heads = queries.vectors.shape[1]
        dilated = 0 if queries.layer < self.from_layer else heads if self.heads is None else self.heads
        gap = torch.where(queries.range(heads) < dilated, self.dilation, 1).view(1, -1, 1, 1, 1)
        window = queries.steps - queries.range(self.window) * gap
        window = window.masked_fill(window < self.sinks, -1)
        first = queries.range(self.sinks).expand(*window.shape[:-1], -1)
        return torch.cat([first, window], -1)
