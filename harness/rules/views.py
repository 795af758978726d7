"""Synthetic full caches for checking policies, in the form in which the engine shows them to `importance`.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvbench.policies import Attention, CacheView, HeadSizes, Policy, Statistic, Written

LARGEST = 2**17  # tokens
_STREAMS, _HEADS, _GROUP = 2, 3, 2
_DIM, _DIM_OF_LARGE, _LARGE_SLOTS = 8, 2, 4096  # caches with more than `_LARGE_SLOTS` slots have smaller heads, to save memory


def random_view(policy: Policy, capacity: int, device: torch.device, seed: int = 0) -> CacheView:
    """Return a full cache with random tokens of a stream 2.5 times as long, in random slots, with statistics after three steps.

    The cache has `capacity + 1` slots.
    """
    draw = torch.Generator().manual_seed(seed)
    newest = capacity + capacity * 3 // 2
    kept = torch.stack([torch.randperm(newest, generator=draw)[:capacity].sort().values for _ in range(_STREAMS * _HEADS)])
    return _view(policy, torch.cat([kept, torch.full_like(kept[:, :1], newest)], 1), newest, device, draw)


def first_full_view(policy: Policy, capacity: int, device: torch.device) -> CacheView:
    """Return a cache that has just become full, and therefore holds every token of the stream."""
    kept = torch.arange(capacity + 1).expand(_STREAMS * _HEADS, -1)
    return _view(policy, kept, capacity, device, torch.Generator().manual_seed(0))


def later(view: CacheView, tokens: int) -> CacheView:
    """Return a copy of the view whose positions and step are shifted by `tokens`."""
    moved = copy.copy(view)
    moved.position, moved.step = view.position + tokens, view.step + tokens
    return moved


def _view(policy: Policy, kept: Tensor, newest: int, device: torch.device, draw: torch.Generator) -> CacheView:
    """Return a cache that holds the positions `kept`, oldest first. [B * H, S] int64."""
    slots = kept.shape[1]
    rank = torch.stack([torch.randperm(slots, generator=draw) for _ in kept])
    position = kept.take_along_dim(rank, 1)
    dim = _DIM_OF_LARGE if slots > _LARGE_SLOTS else _DIM
    keys, values = (torch.randn(_STREAMS, _HEADS, slots, dim, generator=draw).to(device) for _ in range(2))
    rank, position = (x.view(_STREAMS, _HEADS, slots).to(device) for x in (rank, position))
    step = torch.full((_STREAMS, 1, 1), newest, device=device)
    layer, head = torch.tensor([[[1]], [[3]]], device=device), torch.arange(_HEADS, device=device)[:, None]
    view = CacheView(rank, position, step, keys, values, {}, layer, head, torch.zeros_like(step), 4, 7)
    view.states = {s: first_state(s, view) for s in policy.statistics}
    for _ in range(3):
        view.states = updated(view, attention(view, draw))
    return view


def first_state(statistic: Statistic, view: CacheView) -> Tensor:
    """Return a statistic of the tokens in a view before any attention. [B, H, S, *k] float32, or [B, H, *k] float64."""
    dim, written = view.keys.shape[-1], statistic.written(_written(view))
    shape = statistic.shape(HeadSizes(_GROUP, dim, dim))
    if statistic.per == "slot":
        state = torch.full((*view.rank.shape, *shape), statistic.initial, device=view.rank.device)
        return state if written is None else state.copy_(written)
    state = torch.full((*view.rank.shape[:2], *shape), statistic.initial, device=view.rank.device, dtype=torch.float64)
    return state if written is None else state + written.double().sum(2)


def _written(view: CacheView) -> Written:
    """Return the tokens of a view in the form in which they were written to the cache."""
    heads, dim = view.keys.shape[1], view.keys.shape[-1]
    output = torch.linspace(-1, 1, dim, device=view.keys.device).expand(heads, _GROUP, 4, dim)
    return Written(view.keys, view.values, view.position, view.position % 64, view.rotate, output)


def attention(view: CacheView, draw: torch.Generator) -> Attention:
    """Return a step with random queries."""
    group = (*view.rank.shape[:2], _GROUP)
    logits = torch.rand(*group, view.rank.shape[2], generator=draw).to(view.rank.device)
    queries, outputs = (torch.randn(*group, x.shape[-1], generator=draw).to(view.keys) for x in (view.keys, view.values))
    return Attention(weights=logits.softmax(-1), logits=logits, queries=queries, outputs=outputs)


def updated(view: CacheView, step: Attention) -> dict[Statistic, Tensor]:
    """Return the view's statistics after a step."""
    return {s: s.update(x, step, view) if s.sees else x for s, x in view.states.items()}


def cache_over_steps(policy: Policy, capacity: int, steps: int, device: torch.device) -> Iterator[CacheView]:
    """Yield full caches that result from a bound policy's own choices, for `steps` new tokens from the first eviction on.

    The views are copies, which the policy may change.
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
    """Return the view with the next token in the slot of the evicted token. victim: slot to evict. [B, H, 1] int64."""
    new, freed = copy.copy(view), torch.zeros_like(view.rank, dtype=torch.bool).scatter(-1, victim, True)
    younger = view.rank > view.rank.take_along_dim(victim, -1)
    new.rank = (view.rank - younger.long()).masked_fill(freed, capacity)
    new.step, new.states = view.step + 1, {}
    new.position = torch.where(freed, new.step, view.position)
    token = torch.randn(2, *view.keys.shape[:2], 1, view.keys.shape[-1], generator=draw).to(view.keys)
    new.keys, new.values = (torch.where(freed[..., None], x, old) for x, old in zip(token, (view.keys, view.values), strict=True))
    for statistic, state in view.states.items():
        if statistic.per == "slot":
            first = first_state(statistic, new)
            new.states[statistic] = torch.where(freed.view(*freed.shape, *[1] * (state.dim() - 3)), first, state)
        else:
            new.states[statistic] = state + first_state(statistic, new) - first_state(statistic, view)
    return new


def mapped(view: CacheView, change: Callable[[Tensor], Tensor]) -> CacheView:
    """Return the view with `change` applied to every tensor that has a slot axis."""
    new = copy.copy(view)
    for name in ("rank", "position", "keys", "values"):
        setattr(new, name, change(getattr(view, name)))
    new.states = {s: change(x) if s.per == "slot" else x for s, x in view.states.items()}
    return new


def mixed(view: CacheView, other: CacheView, keep: tuple[slice, ...]) -> CacheView:
    """Return `other` with the part `keep` of every tensor taken from `view`."""

    def part(mine: Tensor, theirs: Tensor) -> Tensor:
        out = theirs.clone()
        out[keep] = mine[keep]
        return out

    new = copy.copy(other)
    for name in ("rank", "position", "keys", "values"):
        setattr(new, name, part(getattr(view, name), getattr(other, name)))
    of_whole_heads = len(keep) < 3
    new.states = {s: part(view.states[s], x) if s.per == "slot" or of_whole_heads else x for s, x in other.states.items()}
    return new
