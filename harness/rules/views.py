"""Synthetic full caches for checking policies, in the form in which the engine shows them to `importance`.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvbench.policies import CacheView, Policy, Statistic

LARGEST = 2**17  # tokens
_STREAMS, _HEADS, _GROUP = 2, 3, 2
_DIM, _DIM_OF_LARGE, _LARGE_SLOTS = 8, 2, 4096  # caches with more slots have smaller heads, to save memory


def random_view(policy: Policy, capacity: int, device: torch.device, seed: int = 0) -> CacheView:
    """A full cache with random tokens of a stream 2.5 times as long, in random slots, with statistics after three steps.

    Args:
        policy: whose statistics to keep.
        capacity: tokens kept between steps; there is one more slot.
        device: of the tensors.
        seed: of all random numbers.
    """
    draw = torch.Generator().manual_seed(seed)
    newest = capacity + capacity * 3 // 2
    kept = torch.stack([torch.randperm(newest, generator=draw)[:capacity].sort().values for _ in range(_STREAMS * _HEADS)])
    return _view(policy, torch.cat([kept, torch.full_like(kept[:, :1], newest)], 1), newest, device, draw)


def first_full_view(policy: Policy, capacity: int, device: torch.device, seed: int = 0) -> CacheView:
    """A cache that has just become full, so it holds every token so far. It has the arguments of `random_view`."""
    kept = torch.arange(capacity + 1).expand(_STREAMS * _HEADS, -1)
    return _view(policy, kept, capacity, device, torch.Generator().manual_seed(seed))


def later(view: CacheView, tokens: int) -> CacheView:
    """The same cache, `tokens` further into its stream."""
    moved = copy.copy(view)
    moved.position, moved.step = view.position + tokens, view.step + tokens
    return moved


def _view(policy: Policy, kept: Tensor, newest: int, device: torch.device, draw: torch.Generator) -> CacheView:
    """A cache that holds the positions `kept`, oldest first. [B * H, S] int64."""
    slots = kept.shape[1]
    rank = torch.stack([torch.randperm(slots, generator=draw) for _ in kept])
    position = kept.take_along_dim(rank, 1)
    dim = _DIM_OF_LARGE if slots > _LARGE_SLOTS else _DIM
    keys, values = (torch.randn(_STREAMS, _HEADS, slots, dim, generator=draw).to(device) for _ in range(2))
    rank, position = (x.view(_STREAMS, _HEADS, slots).to(device) for x in (rank, position))
    states: dict[type[Statistic], Tensor] = {
        s: torch.full((*rank.shape, *s.shape), s.initial, device=device) for s in policy.statistics
    }
    step = torch.full((_STREAMS, 1, 1), newest, device=device)
    view = CacheView(rank, position, step, keys, values, states, torch.tensor([[[1]], [[3]]], device=device), 4, 7)
    for _ in range(3):
        view.states = updated(view, attention(view, draw))
    return view


def attention(view: CacheView, draw: torch.Generator) -> Tensor:
    """Random softmax weights of one step. [B, H, G, S] float32."""
    streams, heads, slots = view.rank.shape
    return torch.rand(streams, heads, _GROUP, slots, generator=draw).softmax(-1).to(view.rank.device)


def updated(view: CacheView, mass: Tensor) -> dict[type[Statistic], Tensor]:
    """The view's statistics after a step. mass: [B, H, G, S]."""
    return {s: s.update(x, mass, view) for s, x in view.states.items()}


def cache_over_steps(policy: Policy, capacity: int, steps: int, device: torch.device) -> Iterator[CacheView]:
    """Full caches that result from a policy's own choices, from the first eviction on.

    Args:
        policy: bound. The views are copies, which it may change.
        capacity: tokens kept between steps.
        steps: number of new tokens.
        device: of the tensors.
    """
    draw, view = torch.Generator().manual_seed(0), first_full_view(policy, capacity, device)
    for _ in range(steps):
        yield copy.deepcopy(view)
        importance = policy.importance(copy.deepcopy(view))
        lowest = importance == importance.amin(-1, keepdim=True)
        victim = view.rank.masked_fill(~lowest, capacity + 1).argmin(-1, keepdim=True)
        view = _replaced(view, victim, capacity, draw)
        view.states = updated(view, attention(view, draw))


def _replaced(view: CacheView, victim: Tensor, capacity: int, draw: torch.Generator) -> CacheView:
    """The view with the next token in its victim's slot. victim: [B, H, 1] int64."""
    new, freed = copy.copy(view), torch.zeros_like(view.rank, dtype=torch.bool).scatter(-1, victim, True)
    younger = view.rank > view.rank.take_along_dim(victim, -1)
    new.rank = (view.rank - younger.long()).masked_fill(freed, capacity)
    new.step = view.step + 1
    new.position = torch.where(freed, new.step, view.position)
    token = torch.randn(2, *view.keys.shape[:2], 1, view.keys.shape[-1], generator=draw).to(view.keys)
    new.keys, new.values = (torch.where(freed[..., None], x, old) for x, old in zip(token, (view.keys, view.values), strict=True))
    new.states = {s: torch.where(freed.view(*freed.shape, *[1] * (x.dim() - 3)), s.initial, x) for s, x in view.states.items()}
    return new


def mapped(view: CacheView, change: Callable[[Tensor], Tensor]) -> CacheView:
    """The view with `change` applied to every tensor that has a slot axis."""
    new = copy.copy(view)
    for name in ("rank", "position", "keys", "values"):
        setattr(new, name, change(getattr(view, name)))
    new.states = {s: change(x) for s, x in view.states.items()}
    return new


def mixed(view: CacheView, other: CacheView, keep: tuple[slice, ...]) -> CacheView:
    """`other`, with the part `keep` of every tensor taken from `view`."""
    sources: Iterator[Tensor] = iter([view.rank, view.position, view.keys, view.values, *view.states.values()])

    def change(x: Tensor) -> Tensor:
        out, source = x.clone(), next(sources)
        out[keep] = source[keep]
        return out

    return mapped(other, change)
