"""The reference for the engine: the same policies over plain Python lists. It uses none of our code but the attention hook.

Every token of a head is a tuple in a list; evicting removes it; keys are rotated by the family's own functions.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

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


# (tokens of a head, step, layer, head) -> index of the victim
Chooser = Callable[[list[Held], int, int, int], int]


def oldest(held: list[Held], step: int, layer: int, head: int) -> int:
    return 0


def after_sinks(sinks: int) -> Chooser:
    return lambda held, step, layer, head: next(i for i, t in enumerate(held) if t.position >= sinks)


def lightest(window: int) -> Chooser:
    """H2O: the token outside the window with the lowest accumulated mass; the oldest among equals."""

    def choose(held: list[Held], step: int, layer: int, head: int) -> int:
        old = [i for i, t in enumerate(held) if step - t.position >= window]
        return min(old, key=lambda i: (held[i].mass, held[i].position))

    return choose


def by_number(number: Callable[[int, int, int], float]) -> Chooser:
    """Random: the token with the lowest random number, a function of (layer, head, position)."""
    return lambda held, step, layer, head: min(
        range(len(held)), key=lambda i: (number(layer, head, held[i].position), held[i].position)
    )


def family_rotation(model: Model) -> Callable[..., tuple[Tensor, Tensor]]:
    """The family's own function that rotates, without the wrapper by which a forward pass leaves it out."""
    layer = model.hf.base_model.layers[0]
    attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
    return inspect.unwrap(sys.modules[type(attention).__module__].apply_rotary_pos_emb)


@dataclass
class ListBackend:
    """Reads one stream token by token, with attention over lists that grow and shrink."""

    model: Model
    choose: Chooser
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
        if self.step >= self.first_eviction:
            self._evict(layer, [self.held[layer, head] for head in range(keys.shape[1])])
        return torch.cat(out)[None, :, None]

    def _evict(self, layer: int, heads: list[list[Held]]) -> None:
        """Cut every head of a layer back to its capacity; evicted tokens are merged first."""
        victims: list[list[Held]] = [[] for _ in heads]
        for head, held in enumerate(heads):
            budget = (self.budgets or {}).get(layer, self.capacity)
            while len(held) >= budget + (1 if victims[head] else self.every):
                victims[head].append(held.pop(self.choose(held, self.step, layer, head)))
        if self.merge is not None and any(victims):
            self.merge(heads, [sorted(x, key=lambda t: t.position) for x in victims], layer)

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
