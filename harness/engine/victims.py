"""Choose the tokens to evict at once: the lowest (importance, rank) of each head or layer, or whole pages.

Axis letters: N layers and streams, H KV heads, R = N * H rows, S slots.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.harness.core.evict import Pages

_BEYOND_RANKS = 2**40


def places(importance: Tensor, rank: Tensor) -> Tensor:
    """Return each slot's place in the order of eviction: 0 for the lowest (importance, rank). Empty slots come last.

    Args:
        importance: +inf in empty slots. [..., S] float32.
        rank: distinct among tokens, larger in empty slots. [..., S] int64.

    Returns:
        [..., S] int64.
    """
    order = rank.argsort(-1)
    order = order.take_along_dim(importance.take_along_dim(order, -1).argsort(dim=-1, stable=True), -1)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(rank.shape[-1], device=rank.device).expand_as(order))


def lowest(importance: Tensor, rank: Tensor, most: int) -> Tensor:
    """Return the slots of the `most` lowest (importance, rank), lowest first. -> [..., most or S] int64.

    Arguments are those of `places`.
    """
    if most >= rank.shape[-1]:
        order = rank.argsort(-1)
        return order.take_along_dim(importance.take_along_dim(order, -1).argsort(dim=-1, stable=True), -1)
    last = importance.topk(most, largest=False).values[..., -1:]
    behind = (importance >= last).long() + (importance > last)  # among tokens as important as the last, the oldest are evicted
    slots = (rank + behind * _BEYOND_RANKS).topk(most, largest=False).indices
    return slots.take_along_dim(importance.take_along_dim(slots, -1).argsort(dim=-1, stable=True), -1)


def of_heads(importance: Tensor, rank: Tensor, count: Tensor, most: int) -> Tensor:
    """Choose `count` tokens to evict from each head, at most `most`. importance, rank: [R, S]; count: [R, 1] -> [R, S] bool."""
    slots = lowest(importance, rank, most)
    goes = torch.arange(slots.shape[-1], device=rank.device) < count
    return torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, slots, goes)


def of_layers(importance: Tensor, rank: Tensor, count: Tensor, held: Tensor, floor: int, most: int) -> Tensor:
    """Choose the tokens to evict if all heads of a layer compete: the lowest (importance, rank, head).

    Args:
        importance: +inf in empty slots. [N, H, S] float32.
        rank: [N, H, S] int64.
        count: number of tokens to evict from each layer of each stream. [N, 1] int64.
        held: number of tokens of each head. [N, H, 1] int64.
        floor: minimum number of tokens that every head keeps.
        most: upper bound of `count`.

    Returns:
        [N, H, S] bool.
    """
    heads, slots = rank.shape[1], lowest(importance, rank, most)
    kept = torch.arange(slots.shape[-1], device=rank.device) >= held - floor  # the most important tokens of each head
    by_head = rank.take_along_dim(slots, -1) * heads + torch.arange(heads, device=rank.device)[:, None]
    worth, number = importance.take_along_dim(slots, -1).masked_fill(kept, inf), by_head + kept * _BEYOND_RANKS
    goes = (places(worth.flatten(1), number.flatten(1)) < count).view(slots.shape)
    return torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, slots, goes)


def of_pages(importance: Tensor, rank: Tensor, count: Tensor, pages: Pages, heads: int) -> Tensor:
    """Choose the pages to evict, the least important pages first, and return their tokens.

    A page is `pages.size` tokens of consecutive ranks; a page that is not full is kept. Of equally important pages, those with
    fewer protected tokens (importance +inf) are evicted first. Means ignore tokens that no later query may see.

    Args:
        importance: +inf in empty slots. [R, S] float32.
        rank: [R, S] int64.
        count: number of tokens to evict from each head, a multiple of the page size. [R, 1] int64.
        pages: page size, and the measure of a page's importance.
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
    """Return the ranks after an eviction, without gaps. victims: [R, S] bool; rank: [R, S] int64 -> [R, S] int64."""
    by_rank = rank.clamp(max=rank.shape[1])
    gone = rank.new_zeros(len(rank), rank.shape[1] + 1).scatter_(1, by_rank, victims.long()).cumsum(-1)
    return (rank - gone.gather(1, by_rank)).masked_fill(victims | (rank == empty), empty)
