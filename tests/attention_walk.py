"""A step-by-step eviction that policies and plain rules both go through: attention over what is left of a dense pass.

Logits at positions of the stream depend on query and key alone, so they are those of the dense pass.

Axis letters: B streams, H KV heads, G query heads of a KV head, N tokens of the stream, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp

import torch
from prompt_views import Seen, rotation_of
from torch import Tensor

from kvbench.harness.engine.model import Model
from kvbench.policies import Attention, CacheView, HeadSizes, Policy, Written


@dataclass
class Past:
    """Inputs of a published rule in a layer of one stream, as plain lists. Lists over KV heads come first.

    Attributes:
        held: positions that each KV head holds, oldest first. [H][...]
        logits: logits of each query head at each step, for the positions held at that step. [H][step][G][position]
        weights: softmax of `logits`.
        keys: keys rotated to their positions in the stream. [H][N][D]
        ids: token ids. [N]
        uniform: random number of every head and position. [H][N]
        prompt: number of tokens of the prompt.
    """

    keys: list[list[list[float]]]
    ids: list[int]
    uniform: list[list[float]]
    prompt: int
    held: list[list[int]] = field(default_factory=list)
    logits: list[list[list[dict[int, float]]]] = field(default_factory=list)
    weights: list[list[list[dict[int, float]]]] = field(default_factory=list)

    @property
    def now(self) -> int:
        """The newest token's position."""
        return len(self.weights[0]) - 1

    def sums(self, head: int, step: int) -> dict[int, float]:
        """Attention of the query group at a step."""
        group = self.weights[head][step]
        return {p: sum(query[p] for query in group) for p in group[0]}


Rule = Callable[[Past], list[list[float]]]  # worth of the positions held, by KV head


def lists_of(model: Model, layer: int, seen: Seen, tokens: Tensor, prompt: int, seed: int) -> list[Past]:
    """The pasts of a layer's streams before the first token."""
    heads, length = seen.keys.shape[1:3]
    at = torch.arange(length)
    rotated = rotation_of(model, layer)(seen.keys, at.expand(seen.keys.shape[:-1]))
    view = _view(seen, tokens, prompt, layer, seed, model)
    view.position = at.expand(seen.keys.shape[:-1])
    uniform = view.uniform().tolist()
    nothing = [[] for _ in range(heads)], [[] for _ in range(heads)], [[] for _ in range(heads)]
    return [
        Past(rotated[b].tolist(), tokens[b].tolist(), uniform[b], prompt, *([list(x) for x in part] for part in nothing))
        for b in range(len(tokens))
    ]


def walk_lists(pasts: list[Past], seen: Seen, rule: Rule, capacity: int, first: int = 0) -> None:
    """Read all tokens, keep at most `capacity` from step `first` on. Changes the pasts."""
    for b, past in enumerate(pasts):
        logits = seen.logits[b].tolist()
        for t in range(len(past.ids)):
            for head, held in enumerate(past.held):
                held.append(t)
                rows = [{p: query[t][p] for p in held} for query in logits[head]]
                past.logits[head].append(rows)
                past.weights[head].append([_softmax(row) for row in rows])
            if t >= first and len(past.held[0]) > capacity:
                past.held = best(past, rule, capacity)


def best(past: Past, rule: Rule, budget: int) -> list[list[int]]:
    """The positions of highest (worth, rank), in order."""
    return [
        sorted(held[i] for i in sorted(range(len(held)), key=lambda i: (worth[i], i))[max(0, len(held) - budget) :])
        for held, worth in zip(past.held, rule(past), strict=True)
    ]


def walk_policy(
    model: Model, layer: int, seen: Seen, tokens: Tensor, policy: Policy, capacity: int, prompt: int = 0, seed: int = 0
) -> list[list[list[int]]]:
    """The positions that each KV head holds at the end, if the policy evicts at every step. Slots are used in a random order."""
    draw = torch.Generator().manual_seed(seed)
    view = _view(seen, tokens, prompt, layer, seed, model, capacity + 1)
    (streams, heads, length), slots = seen.keys.shape[:3], capacity + 1
    order = torch.stack([torch.randperm(slots, generator=draw) for _ in range(streams * heads)]).view(streams, heads, slots)
    sizes = HeadSizes(seen.queries.shape[2], seen.keys.shape[-1], seen.values.shape[-1])
    view.states = {s: torch.full((streams, heads, slots, *s.shape(sizes)), 7.0) for s in policy.statistics}
    free = order[..., :1]
    for t in range(length):
        _write(view, seen, tokens, free, t)
        logits = seen.logits[:, :, :, t].gather(-1, view.position.clamp(min=0)[:, :, None].expand(-1, -1, sizes.group, -1))
        logits = logits.masked_fill(~view.valid[:, :, None], -torch.inf)
        step = Attention(weights=logits.softmax(-1), logits=logits, queries=seen.queries[:, :, :, t])
        view.states = {s: s.update(x, step, view) if s.sees else x for s, x in view.states.items()}
        free = order[..., t + 1 : t + 2] if t < capacity else _evict(policy, view)
    return [
        [sorted(p for p, r in zip(*head, strict=True) if r < slots) for head in zip(*of_stream, strict=True)]
        for of_stream in zip(view.position.tolist(), view.rank.tolist(), strict=True)
    ]


def _view(seen: Seen, tokens: Tensor, prompt: int, layer: int, seed: int, model: Model, slots: int = 0) -> CacheView:
    """A cache of empty slots with garbage in them."""
    streams, heads, _, dim = seen.keys.shape
    empty, one = torch.full((streams, heads, slots), slots), torch.ones(streams, 1, 1, dtype=torch.int64)
    keys = torch.full((streams, heads, slots, dim), 1e4)
    return CacheView(
        empty,
        torch.full_like(empty, -1),
        one * 0,
        keys,
        keys.clone(),
        {},
        one * layer,
        torch.arange(heads)[:, None],
        one * prompt,
        len(model.layers),
        seed,
        rotation_of(model, layer),
    )


def _write(view: CacheView, seen: Seen, tokens: Tensor, free: Tensor, t: int) -> None:
    """Put token t into the free slots. free: [B, H, 1]."""
    view.step, view.rank = torch.full_like(view.step, t), view.rank.scatter(-1, free, view.count)
    view.position = view.position.scatter(-1, free, t)
    index = free[..., None].expand(-1, -1, -1, view.keys.shape[-1])
    view.keys = view.keys.scatter(2, index, seen.keys[:, :, t : t + 1])
    view.values = view.values.scatter(2, index, seen.values[:, :, t : t + 1])
    ids = tokens[:, None, t].expand(seen.keys.shape[:2])
    written = Written(seen.keys[:, :, t], seen.values[:, :, t], torch.full_like(ids, t), ids, view.rotate)
    for s, state in view.states.items():
        value = s.written(written)
        for b, h in torch.cartesian_prod(*(torch.arange(n) for n in free.shape[:2])).tolist():
            state[b, h, free[b, h, 0]] = s.initial if value is None else value[b, h]


def _evict(policy: Policy, view: CacheView) -> Tensor:
    """Empty the slot of lowest (importance, rank) of each head. [B, H, 1]."""
    importance = policy.importance(view)
    lowest = importance == importance.amin(-1, keepdim=True)
    victim = view.rank.masked_fill(~lowest, view.rank.shape[-1]).argmin(-1, keepdim=True)
    place = view.rank.gather(-1, victim)
    view.rank = (view.rank - (view.rank > place).long()).scatter(-1, victim, view.rank.shape[-1])
    return victim


def _softmax(row: dict[int, float]) -> dict[int, float]:
    top = max(row.values())
    total = sum(exp(x - top) for x in row.values())
    return {p: exp(x - top) / total for p, x in row.items()}
