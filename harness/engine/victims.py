"""Which tokens go when several go at once: the lowest (importance, rank) of a head, or of all heads of a layer, or whole pages.

Axis letters: N layers and streams, H KV heads, R = N * H rows, S slots.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.harness.core.evict import Pages


def places(importance: Tensor, rank: Tensor) -> Tensor:
    """Each slot's place in the order in which tokens go: 0 is the lowest (importance, rank). Empty slots come last.

    Args:
        importance: +inf in empty slots. [..., S] float32.
        rank: distinct among tokens, larger in empty slots. [..., S] int64.

    Returns:
        [..., S] int64.
    """
    order = rank.argsort(-1)
    order = order.take_along_dim(importance.take_along_dim(order, -1).argsort(dim=-1, stable=True), -1)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(rank.shape[-1], device=rank.device).expand_as(order))


def of_heads(importance: Tensor, rank: Tensor, count: Tensor) -> Tensor:
    """The `count` tokens that go from each head. importance, rank: [R, S]; count: [R, 1] -> [R, S] bool."""
    return places(importance, rank) < count


def of_layers(importance: Tensor, rank: Tensor, count: Tensor, held: Tensor, floor: int) -> Tensor:
    """The tokens that go when all heads of a layer compete: the lowest (importance, rank, head).

    Args:
        importance: +inf in empty slots. [N, H, S] float32.
        rank: [N, H, S] int64.
        count: tokens that go from each layer of each stream. [N, 1] int64.
        held: tokens of each head. [N, H, 1] int64.
        floor: tokens that every head keeps.

    Returns:
        [N, H, S] bool.
    """
    heads = rank.shape[1]
    kept = places(importance, rank) >= held - floor  # the best of each head
    by_head = rank * heads + torch.arange(heads, device=rank.device)[:, None]
    return (places(importance.masked_fill(kept, inf).flatten(1), by_head.flatten(1)) < count).view(rank.shape)


def of_pages(importance: Tensor, rank: Tensor, count: Tensor, pages: Pages, heads: int) -> Tensor:
    """The tokens of the pages that go: those worth least, of which a page without tokens that are never evicted comes first.

    A page is `pages.size` tokens that follow each other in rank; one that isn't full stays. Tokens that no later query may see
    count for nothing in a mean.

    Args:
        importance: +inf in empty slots. [R, S] float32.
        rank: [R, S] int64.
        count: tokens that go from each head: whole pages. [R, 1] int64.
        pages: how they are judged.
        heads: H.

    Returns:
        [R, S] bool.
    """
    order, room = rank.argsort(-1), -rank.shape[1] % pages.size
    tokens = pad(importance.take_along_dim(order, -1), (0, room), value=inf).unflatten(-1, (-1, pages.size))
    protected, hidden = tokens == inf, tokens == -inf
    if pages.worth == "max":
        worth = tokens.amax(-1)
    else:
        worth = tokens.masked_fill(hidden, 0).sum(-1) / (~hidden).sum(-1).clamp(min=1)
        worth = worth.masked_fill(hidden.all(-1), -inf)
    kept = protected.sum(-1)
    if pages.by == "union":
        worth, kept = (x.unflatten(0, (-1, heads)).amax(1).repeat_interleave(heads, 0) for x in (worth, kept))
    number = torch.arange(worth.shape[1], device=rank.device)
    goes = places(worth, kept * worth.shape[1] + number) < count // pages.size
    by_rank = goes.repeat_interleave(pages.size, -1)[:, : rank.shape[1]]
    return torch.empty_like(by_rank).scatter_(-1, order, by_rank)


def ranks_without(victims: Tensor, rank: Tensor, empty: int) -> Tensor:
    """Ranks once some tokens are gone: the others close up. victims: [R, S] bool; rank: [R, S] int64 -> the same."""
    order = rank.argsort(-1)
    gone = victims.take_along_dim(order, -1).long().cumsum(-1)
    fewer = torch.empty_like(gone).scatter_(-1, order, gone)
    return (rank - fewer).masked_fill(victims | (rank == empty), empty)
