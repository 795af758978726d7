"""Synthetic full caches for checking policies, in the form in which the engine shows them to `importance`.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvbench.policies import Attention, CacheView, HeadSizes, Policy, Statistic, Written

CPU = torch.device("cpu")
_STREAMS, _HEADS, _GROUP, _DIM = 2, 3, 2, 8
_CAPACITY_OF_DENSE = 16  # tokens in the caches shown to a policy that never evicts
_MAX_STEPS = 64
_MAX_SLOTS_OF_ALL_STEPS = 2**17


class Case:
    """A policy at one capacity, and caches to show to it.

    Attributes:
        unbound: the policy.
        policy: bound to the capacity, if it evicts.
        capacity: of the caches, in tokens.
        device: of the caches.
    """

    def __init__(self, policy: Policy, capacity: int | None, device: torch.device = CPU) -> None:
        """Bind a policy to a capacity, if it evicts.

        Raises:
            ValueError: the policy can't work with this capacity.
        """
        self.unbound, self.policy, self.capacity, self.device = policy, policy, _CAPACITY_OF_DENSE, device
        if policy.evicts and capacity is not None:
            self.policy, self.capacity = policy.bind(capacity), capacity

    def random_view(self, seed: int = 0) -> CacheView:
        """Return a full cache with random tokens of a stream 2.5 times as long, in random slots."""
        draw, tokens = torch.Generator().manual_seed(seed), self.capacity
        newest = tokens + tokens * 3 // 2
        kept = torch.stack([torch.randperm(newest, generator=draw)[:tokens].sort().values for _ in range(_STREAMS * _HEADS)])
        return _view(self.policy, torch.cat([kept, torch.full_like(kept[:, :1], newest)], 1), self.device, draw)

    def views_over_steps(self) -> Iterator[CacheView]:
        """Yield full caches of the tokens that the policy keeps, from the first eviction on; none if it never evicts.

        K, V and statistics are drawn anew for every step.
        """
        draw, steps = torch.Generator().manual_seed(0), max(2, min(_MAX_STEPS, _MAX_SLOTS_OF_ALL_STEPS // (self.capacity + 1)))
        kept = torch.arange(self.capacity + 1).expand(_STREAMS * _HEADS, -1)
        for newest in range(self.capacity, self.capacity + steps) if self.policy.evicts else ():
            view = _view(self.policy, kept, self.device, draw)
            yield copy.deepcopy(view)
            importance = self.policy.importance(view).take_along_dim(view.rank.argsort(-1), -1).flatten(0, 1).cpu()
            victim = (importance == importance.amin(-1, keepdim=True)).int().argmax(-1, keepdim=True)  # the oldest of the least
            held = torch.ones_like(kept, dtype=torch.bool).scatter(-1, victim, False)
            kept = torch.cat([kept[held].view(len(kept), -1), torch.full_like(victim, newest + 1)], 1)


def _view(policy: Policy, kept: Tensor, device: torch.device, draw: torch.Generator) -> CacheView:
    """Return a cache that holds the positions `kept`, oldest first, with statistics after three steps. kept: [B * H, S] int64."""
    shape = (_STREAMS, _HEADS, kept.shape[1])
    rank = torch.stack([torch.randperm(kept.shape[1], generator=draw) for _ in kept])
    position = kept.take_along_dim(rank, 1).view(shape).to(device)
    keys, values = (torch.randn(*shape, _DIM, generator=draw).to(device) for _ in range(2))
    step = torch.full((_STREAMS, 1, 1), int(kept[0, -1]), device=device)
    layer, head = torch.tensor([[[1]], [[3]]], device=device), torch.arange(_HEADS, device=device)[:, None]
    view = CacheView(rank.view(shape).to(device), position, step, keys, values, {}, layer, head, torch.zeros_like(step), 4, 7)
    view.states = {s: first_state(s, view) for s in policy.statistics}
    for _ in range(3):
        view.states = updated(view, attention(view, draw))
    return view


def first_state(statistic: Statistic, view: CacheView) -> Tensor:
    """Return a statistic of the tokens in a view before any attention. [B, H, S, *k] float32, or [B, H, *k] float64."""
    output = torch.linspace(-1, 1, _DIM, device=view.keys.device).expand(_HEADS, _GROUP, 4, _DIM)
    tokens = Written(view.keys, view.values, view.position, view.position % 64, view.rotate, output)
    written, shape = statistic.written(tokens), statistic.shape(HeadSizes(_GROUP, _DIM, _DIM))
    if statistic.per == "slot":
        state = torch.full((*view.rank.shape, *shape), statistic.initial, device=view.rank.device)
        return state if written is None else state.copy_(written)
    state = torch.full((*view.rank.shape[:2], *shape), statistic.initial, device=view.rank.device, dtype=torch.float64)
    return state if written is None else state + written.double().sum(2)


def attention(view: CacheView, draw: torch.Generator) -> Attention:
    """Return a step with random queries."""
    group = (*view.rank.shape[:2], _GROUP)
    logits = torch.rand(*group, view.rank.shape[2], generator=draw).to(view.rank.device)
    queries, outputs = (torch.randn(*group, _DIM, generator=draw).to(view.keys) for _ in range(2))
    return Attention(weights=logits.softmax(-1), logits=logits, queries=queries, outputs=outputs)


def updated(view: CacheView, step: Attention) -> dict[Statistic, Tensor]:
    """Return the view's statistics after a step."""
    return {s: s.update(x, step, view) if s.sees else x for s, x in view.states.items()}


def combined(view: CacheView, other: CacheView, combine: Callable[[Tensor, Tensor], Tensor], of_heads: bool = False) -> CacheView:
    """Return `other` with the combination of both views in every tensor that has a slot axis, and in heads' states if asked."""
    new = copy.copy(other)
    for name in ("rank", "position", "keys", "values"):
        setattr(new, name, combine(getattr(view, name), getattr(other, name)))
    new.states = {s: combine(view.states[s], x) if s.per == "slot" or of_heads else x for s, x in other.states.items()}
    return new
