"""A step-by-step eviction by plain rules: attention over what is left of a dense pass.

Logits at positions of the stream depend on query and key alone, so they are those of the dense pass.

Axis letters: B streams, H KV heads, G query heads of a KV head, D key dim, N tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp

import torch
from factories import uniform_number
from prompt_views import Seen, rotation_of
from torch import Tensor

from kvbench.harness.engine.model import Model


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
    rotated = rotation_of(model, layer)(seen.keys, torch.arange(length).expand(seen.keys.shape[:-1]))
    uniform = [[uniform_number(layer, head, position, seed) for position in range(length)] for head in range(heads)]
    return [
        Past(rotated[b].tolist(), ids, uniform, prompt, *([[] for _ in range(heads)] for _ in range(3)))
        for b, ids in enumerate(tokens.tolist())
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


def _softmax(row: dict[int, float]) -> dict[int, float]:
    top = max(row.values())
    total = sum(exp(x - top) for x in row.values())
    return {p: exp(x - top) / total for p, x in row.items()}
