"""The reference for budgets, cadence and prompts: every head's tokens are a plain list, and evicting deletes from it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch
from reference import Held, ListBackend
from torch import Tensor

from kvbench.harness.core.evict import Pages
from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.model import Model

# (tokens of a head, step, layer, head) -> how much each token is worth
Worth = Callable[[list[Held], int, int, int], list[float]]


def by_mass(window: int) -> Worth:
    """H2O."""
    return lambda held, step, layer, head: [inf if step - t.position < window else t.mass for t in held]


def by_key_norm(held: list[Held], step: int, layer: int, head: int) -> list[float]:
    """Small keys are kept."""
    return [-float(t.key.float().norm()) for t in held]


def by_distance_from_mean(held: list[Held], step: int, layer: int, head: int) -> list[float]:
    """Tokens whose key points elsewhere than the mean of the head's unit keys are kept; the newest always."""
    unit = [t.key.double() / t.key.double().norm().clamp(min=1e-12) for t in held]  # a padding token's key is 0
    mean = torch.stack(unit).sum(0)
    return [inf if t.position == step else -float(u @ mean / mean.norm()) for t, u in zip(held, unit, strict=True)]


@dataclass
class BudgetBackend(ListBackend):
    """Reference that reads one stream token by token under budgets.

    Attributes:
        worth: returns the importance of a head's tokens.
        table: budget of every head. [L][H].
        every: number of tokens evicted at once.
        floor: smallest number of tokens per head if the heads of a layer share a budget; else None.
        prompt: tokens read before the first eviction; 0: none.
        grows: whether nothing is evicted after the prompt.
        pages: settings if whole pages of `every` tokens are evicted.
    """

    worth: Worth = field(default=by_key_norm)
    table: list[list[int]] = field(default_factory=list)
    every: int = 1
    floor: int | None = None
    prompt: int = 0
    grows: bool = False
    pages: Pages | None = None

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """[1, H * G, 1, D], [1, H, 1, D], [1, H, 1, Dv] -> [1, H * G, 1, Dv]."""
        self.first_eviction = 10**9
        out = super().attend(layer, query, keys, values, terms)
        heads = [self.held[layer, head] for head in range(keys.shape[1])]
        if self.step + 1 < self.prompt or (self.grows and self.step + 1 > self.prompt):
            return out
        at_once = 1 if self.step + 1 == self.prompt else self.every
        if self.pages is not None:
            self._evict_pages(layer, heads, at_once)
        elif self.floor is None:
            for head, held in enumerate(heads):
                excess = len(held) - self.table[layer][head]
                self._evict(layer, {head: held}, excess if excess >= at_once else 0, 0)
        else:
            excess = sum(map(len, heads)) - sum(self.table[layer])
            self._evict(layer, dict(enumerate(heads)), excess if excess >= len(heads) * at_once else 0, self.floor)
        return out

    def _evict(self, layer: int, heads: dict[int, list[Held]], count: int, floor: int) -> None:
        """Delete the tokens that are worth least, the older and then the lower head first among equals."""
        candidates = []
        for head, held in heads.items():
            worth = self.worth(held, self.step, layer, head)
            order = sorted(range(len(held)), key=lambda i: (worth[i], i))
            candidates += [(worth[i], i, head) for i in order[: len(held) - floor]]
        for _, i, head in sorted(sorted(candidates)[: max(0, count)], key=lambda c: -c[1]):
            del heads[head][i]

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


def run(model: Model, tokens: Tensor, **how) -> BudgetBackend:
    """The reference after a stream; `logits` are of all its tokens. how: of `BudgetBackend`."""
    backend = BudgetBackend(model, None, 10**9, **how)
    backend.logits = backend.run(tokens)
    return backend
