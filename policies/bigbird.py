"""BigBird's pattern: first blocks, a window of newest blocks, and random blocks that each block of queries draws anew.

Source: Zaheer et al. 2020, arXiv:2007.14062, Section 2 and Appendix D.
Differs: the paper's window has two sides, of which a decoder sees one, so here the window is the query's own block and those
    before it. Random blocks are drawn per layer and KV head by a hash. `bigbird_static` draws once for all queries, and evicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.policies.selects import Queries, Selecting

_BLOCKS = 2**20  # more than a stream has


@dataclass(frozen=True)
class BigBird(Selecting):
    """Read the first blocks, the newest blocks, and random blocks between."""

    block: int = 64  # tokens
    first: int = 2  # blocks
    window: int = 3  # blocks, the query's own included
    random: int = 3  # blocks

    def __post_init__(self) -> None:
        if min(self.block, self.window) < 1 or min(self.first, self.random) < 0:
            raise ValueError(f"block {self.block} and window {self.window} must be at least 1, first and random 0")

    def select(self, queries: Queries) -> Tensor:
        """First, newest and random blocks. [B, H, 1, T, n] int64."""
        own = queries.steps // self.block
        newest = own - queries.range(self.window)
        newest = newest.masked_fill(newest < self.first, -1)
        blocks = queries.range(-(-queries.keys.shape[2] // self.block))
        chance = queries.uniform(own * _BLOCKS + blocks)
        chance = chance.masked_fill((blocks < self.first) | (blocks > own - self.window), -1)
        drawn = chance.topk(min(self.random, len(blocks)), dim=-1)
        random = drawn.indices.masked_fill(drawn.values < 0, -1)
        first = queries.range(self.first).expand(*random.shape[:-1], -1)
        pages = torch.cat([first, newest.expand(*random.shape[:-1], -1), random], -1)
        return queries.slots_of_pages(pages, self.block)
