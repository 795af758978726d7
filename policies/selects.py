"""Selection: every token stays in the cache, and each query reads some of them.

Axis letters: B streams, H KV heads, G query heads of a KV head, T queries, S slots, P pages, n slots read, D key dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView, uniform


@dataclass(frozen=True)
class Queries:
    """Queries of one layer, and the cached keys that they may read. The token at position p is in slot p.

    Attributes:
        vectors: queries, rotated and unscaled. [B, H, G, T, D], the model's dtype.
        step: index of each query's token in its stream; the query may read tokens up to this index. [B, T] int64.
        keys: rotated keys. Slots after a query's own hold later tokens or arbitrary values. [B, H, S, D], the model's dtype.
        layer: index of the layer.
        num_layers: number of layers of the model.
        seed: the cell's seed.
        extremes: returns the smallest and the largest value in each channel of a page of keys, for a page size.
            int -> two of [B, H, P, D].
    """

    vectors: Tensor
    step: Tensor
    keys: Tensor
    layer: int
    num_layers: int
    seed: int
    extremes: Callable[[int], tuple[Tensor, Tensor]] = field(repr=False)

    @property
    def steps(self) -> Tensor:
        """`step` in a shape that broadcasts with slots. [B, 1, 1, T, 1] int64."""
        return self.step[:, None, None, :, None]

    def range(self, count: int) -> Tensor:
        """Integers from 0, along the last axis. [count] int64."""
        return torch.arange(count, device=self.step.device)

    def slots_of_pages(self, pages: Tensor, size: int) -> Tensor:
        """Slots of the tokens on these pages. [B, H, G, T, k] int64 -> [B, H, G, T, k * size]."""
        return (pages[..., None] * size + self.range(size)).flatten(-2)

    def page_bounds(self, size: int) -> Tensor:
        """Upper bound of a query's dot product with the keys that it may read on each page; -inf for later pages.

        The bound is the sum over channels of max(q * smallest, q * largest).

        Args:
            size: tokens of a page.

        Returns:
            [B, H, G, T, P] float32 or wider.
        """
        low, high = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.extremes(size))
        vectors = self.vectors.to(low.dtype)
        positive, negative = vectors.clamp(min=0), vectors.clamp(max=0)
        bounds = torch.einsum("bhgtd,bhpd->bhgtp", positive, high) + torch.einsum("bhgtd,bhpd->bhgtp", negative, low)
        page = torch.arange(bounds.shape[-1], device=bounds.device)
        bounds = bounds.masked_fill(page > self.steps // size, -inf)
        if self.step.shape[1] == 1:
            return bounds
        own = self._own_page(positive, negative, size, bounds.shape[-1])
        return torch.where(page == self.steps // size, own[..., None], bounds)

    def _own_page(self, positive: Tensor, negative: Tensor, size: int, pages: int) -> Tensor:
        """Bound of the page of each query's own token, without the later tokens on that page. [B, H, G, T]."""
        padded = torch.nn.functional.pad(self.keys[:, :, : pages * size], (0, 0, 0, max(0, pages * size - self.keys.shape[2])))
        by_page = padded.to(positive.dtype).unflatten(2, (pages, size))
        index = self.step[:, None, :, None].expand(-1, padded.shape[1], -1, padded.shape[-1])
        high, low = (x.values.flatten(2, 3).gather(2, index)[:, :, None] for x in (by_page.cummax(3), by_page.cummin(3)))
        return (positive * high + negative * low).sum(-1)

    def uniform(self, position: Tensor) -> Tensor:
        """A random number in [0, 1) for each position and KV head: a hash of (seed, layer, head, position), as in `CacheView`.

        Args:
            position: any integers. [B, 1, 1, ...] int64.

        Returns:
            [B, H, 1, ...] float32.
        """
        head = torch.arange(self.vectors.shape[1], device=position.device)
        return uniform(position, head.view(1, -1, *[1] * (position.dim() - 2)), self.layer, self.seed)


@dataclass(frozen=True)
class Selecting(Policy):
    """A policy that keeps every token, and chooses for each query which of them are read.

    It takes no capacity, keeps no statistics, and works with RoPE at the positions of the stream. With `evict: prompt`, the
    prompt is read under full attention.
    """

    evicts: ClassVar[bool] = False

    def importance(self, view: CacheView) -> Tensor:
        """+inf: no token is ever evicted. [B, H, S] float32."""
        return torch.full_like(view.rank, inf, dtype=torch.float32)

    @abstractmethod
    def select(self, queries: Queries) -> Tensor | None:
        """Slots that each query reads; None if the layer's queries read all tokens.

        The slots of a query are distinct and include at least one that it may read. Slots below 0 or after the query's own are
        ignored, so that queries may read different numbers of tokens.

        Returns:
            [B, H, G, T, n] int64; the axes before T may be 1, if all streams, heads or queries of a head read the same.
        """
