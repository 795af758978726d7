"""The reference for the engine: the same policies over plain Python lists. It uses none of our code but the attention hook.

Every token of a head is a tuple in a list; evicting removes it; keys are rotated by the family's own functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from kvbench.harness.core.evict import Pages
from kvbench.harness.engine import attention
from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.model import Model


@dataclass
class Held:
    """A token in the cache of a head."""

    position: int
    key: Tensor
    value: Tensor
    mass: float = 0.0
    newest_mass: float = 0.0  # of the last step alone


# (tokens of a head, step, layer, head) -> how much each token is worth
Worth = Callable[[list[Held], int, int, int], list[float]]


def by_position(held: list[Held], step: int, layer: int, head: int) -> list[float]:
    """New tokens are kept."""
    return [t.position for t in held]


def after_sinks(sinks: int) -> Worth:
    return lambda held, step, layer, head: [inf if t.position < sinks else t.position for t in held]


def by_mass(window: int) -> Worth:
    """H2O: tokens in the window are kept, and of the others those with the largest accumulated mass."""
    return lambda held, step, layer, head: [inf if step - t.position < window else t.mass for t in held]


def by_number(number: Callable[[int, int, int], float]) -> Worth:
    """Random: a random number, which is a function of (layer, head, position)."""
    return lambda held, step, layer, head: [number(layer, head, t.position) for t in held]


def by_key_norm(held: list[Held], step: int, layer: int, head: int) -> list[float]:
    """Small keys are kept."""
    return [-float(t.key.float().norm()) for t in held]


def by_distance_from_mean(held: list[Held], step: int, layer: int, head: int) -> list[float]:
    """Tokens whose key points elsewhere than the mean of the head's unit keys are kept; the newest always."""
    unit = [t.key.double() / t.key.double().norm().clamp(min=1e-12) for t in held]  # a padding token's key is 0
    mean = torch.stack(unit).sum(0)
    return [inf if t.position == step else -float(u @ mean / mean.norm()) for t, u in zip(held, unit, strict=True)]


def family_rotation(model: Model) -> Callable[..., tuple[Tensor, Tensor]]:
    """The family's own function that rotates, without the wrapper by which a forward pass leaves it out."""
    layer = model.hf.base_model.layers[0]
    attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
    return inspect.unwrap(sys.modules[type(attention).__module__].apply_rotary_pos_emb)


@dataclass
class ListBackend:
    """Reads one stream token by token, with attention over lists that grow and shrink."""

    model: Model
    worth: Worth
    capacity: int
    mode: str = "cache"
    limit: int = 0
    held: dict[tuple[int, int], list[Held]] = field(default_factory=dict)
    kept: list[list[list[list[int]]]] = field(default_factory=list)  # per step, layer, head
    step: int = 0
    first_eviction: int = 0  # first step that evicts
    every: int = 1  # tokens evicted at once
    budgets: dict[int, int] | None = None  # tokens kept in a layer, where it is not the capacity
    merge: Callable[[list[list[Held]], list[list[Held]], int], None] | None = None  # (kept, evicted, layer)
    reads: Callable[[Tensor, Tensor, int, int, int], list[int]] | None = None  # (query, keys, step, layer, head) -> positions

    def __post_init__(self) -> None:
        self.rotate = family_rotation(self.model)

    def run(self, tokens: Tensor) -> Tensor:
        """Logits of a stream. [1, T] -> [1, T, V]."""
        out = []
        with torch.inference_mode():
            for self.step in range(tokens.shape[1]):
                out.append(self.model(tokens[:, self.step : self.step + 1], self))
                heads = self.model.layers[0].heads
                self.kept.append(
                    [[[t.position for t in self.held[layer, h]] for h in range(heads)] for layer in range(len(self.model.layers))]
                )
        return torch.cat(out, 1)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        group = query.shape[1] // keys.shape[1]
        out = []
        for head in range(keys.shape[1]):
            held = self.held.setdefault((layer, head), [])
            held.append(Held(self.step, keys[0, head, 0], values[0, head, 0]))
            stack = torch.stack([t.key for t in held])
            own, theirs = self._places(held)
            q = self._rotated(query[0, head * group : (head + 1) * group, 0], torch.tensor([own] * group, device=query.device))
            k = self._rotated(stack, torch.tensor(theirs, device=query.device))
            scores = q @ k.T * terms.scaling
            if self.reads is not None:
                read = torch.zeros_like(scores, dtype=torch.bool)
                for x, row in zip(q, read, strict=True):
                    row[self.reads(x, k, self.step, layer, head)] = True
                scores = scores.masked_fill(~read, -torch.inf)
            mass = torch.softmax(scores, -1)
            out.append(mass @ torch.stack([t.value for t in held]))
            for token, m in zip(held, mass.sum(0), strict=True):
                token.mass, token.newest_mass = float(torch.tensor(token.mass, device=m.device) + m), float(m)
        self._cut(layer, [self.held[layer, head] for head in range(keys.shape[1])])
        return torch.cat(out)[None, :, None]

    def _cut(self, layer: int, heads: list[list[Held]]) -> None:
        """Cut every head of a layer back to its capacity; evicted tokens are merged first."""
        excess = [len(held) - (self.budgets or {}).get(layer, self.capacity) for held in heads]
        if self.step < self.first_eviction or max(excess) < self.every:
            return
        victims = [self._evict(layer, {head: held}, excess[head]) for head, held in enumerate(heads)]
        if self.merge is not None:
            self.merge(heads, victims, layer)

    def _evict(self, layer: int, heads: dict[int, list[Held]], count: int, floor: int = 0) -> list[Held]:
        """Delete the tokens that are worth least, the older and then the lower head first among equals. -> oldest first."""
        candidates = []
        for head, held in heads.items():
            worth = self.worth(held, self.step, layer, head)
            order = sorted(range(len(held)), key=lambda i: (worth[i], i))
            candidates += [(worth[i], i, head) for i in order[: len(held) - floor]]
        chosen = sorted(sorted(candidates)[: max(0, count)], key=lambda c: -c[1])
        return [heads[head].pop(i) for _, i, head in chosen][::-1]

    def _places(self, held: list[Held]) -> tuple[int, list[int]]:
        """The positions of the query and the keys."""
        if self.mode == "cache":
            return len(held) - 1, list(range(len(held)))
        if self.mode == "stream":
            return self.step, [t.position for t in held]
        return self.limit, [self.limit - min(self.step - t.position, self.limit) for t in held]

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotate with the family's own functions. [N, D] at [N] positions."""
        cos, sin = self.model.hf.base_model.rotary_emb(x[None], places[None])
        return self.rotate(x[None, None], x[None, None], cos, sin)[0][0, 0]


@dataclass
class BudgetBackend(ListBackend):
    """Reference that reads one stream token by token under budgets.

    Attributes:
        table: budget of every head. [L][H].
        floor: smallest number of tokens per head if the heads of a layer share a budget; else None.
        prompt: tokens read before the first eviction; 0: none.
        grows: whether nothing is evicted after the prompt.
        pages: settings if whole pages of `every` tokens are evicted.
    """

    table: list[list[int]] = field(default_factory=list)
    floor: int | None = None
    prompt: int = 0
    grows: bool = False
    pages: Pages | None = None

    def _cut(self, layer: int, heads: list[list[Held]]) -> None:
        if self.step + 1 < self.prompt or (self.grows and self.step + 1 > self.prompt):
            return
        at_once = 1 if self.step + 1 == self.prompt else self.every
        if self.pages is not None:
            self._evict_pages(layer, heads, at_once)
        elif self.floor is None:
            for head, held in enumerate(heads):
                excess = len(held) - self.table[layer][head]
                self._evict(layer, {head: held}, excess if excess >= at_once else 0)
        else:
            excess = sum(map(len, heads)) - sum(self.table[layer])
            self._evict(layer, dict(enumerate(heads)), excess if excess >= len(heads) * at_once else 0, self.floor)

    def _evict_pages(self, layer: int, heads: list[list[Held]], size: int) -> None:
        """Delete the pages that are worth least, those without protected tokens and then the oldest first among equals."""
        judged = []
        for head, held in enumerate(heads):
            worth = self.worth(held, self.step, layer, head)
            pages = [worth[i : i + size] for i in range(0, len(worth) - size + 1, size)]
            mean = self.pages.worth == "mean"
            judged.append([(sum(page) / size if mean else max(page), page.count(inf)) for page in pages])
        if self.pages.by == "union":
            judged = [[tuple(map(max, *page)) for page in zip(*judged, strict=True)]] * len(heads)
        for head, held in enumerate(heads):
            order = sorted(range(len(judged[head])), key=lambda i, of=judged[head]: (*of[i], i))
            for page in sorted(order[: max(0, len(held) - self.table[layer][head]) // size], reverse=True):
                del held[page * size : (page + 1) * size]


def budgeted(model: Model, tokens: Tensor, **how) -> BudgetBackend:
    """The reference after a stream; `logits` are of all its tokens. how: of `BudgetBackend`."""
    backend = BudgetBackend(model, capacity=10**9, **how)
    backend.logits = backend.run(tokens)
    return backend


@dataclass
class WideLists(ListBackend):
    """`ListBackend` with float64 angles, because the family's float32 tables would round some codes differently."""

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotate by float64 angles. [N, D] at [N] positions."""
        rotation = self.model.layers[0].rotation
        angles = places[:, None].double() * rotation.frequencies
        pairs = torch.view_as_complex(x[:, rotation.order].unflatten(1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)
        return torch.empty_like(x).index_copy_(1, rotation.order, turned)


@dataclass
class MaskBackend:
    """Reads the whole stream at once over all K and V, with evicted tokens masked: the oracle for eviction."""

    model: Model
    kept: list[list[list[list[int]]]]  # held after each step, per layer and head

    def __post_init__(self) -> None:
        self.rotate = family_rotation(self.model)

    def run(self, tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model(tokens, self)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        length, group = keys.shape[2], query.shape[1] // keys.shape[1]
        seen = torch.zeros(keys.shape[1], length, length, dtype=torch.bool, device=keys.device)
        for t in range(length):
            for head in range(keys.shape[1]):
                before = self.kept[t - 1][layer][head] if t else []
                seen[head, t, [*before, t]] = True
        cos, sin = self.model.hf.base_model.rotary_emb(keys, torch.arange(length, device=keys.device)[None])
        q, k = self.rotate(query, keys, cos, sin)
        k, v, seen = (x.repeat_interleave(group, -3) for x in (k, values, seen))
        scores = (q @ k.mT * terms.scaling).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v


assert attention.NAME  # the only code of ours that is used
