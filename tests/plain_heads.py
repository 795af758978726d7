"""Queries, keys and values of a head as lists of numbers, for references written without tensors.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, N tokens of the prompt.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache

import torch
from helpers import DEVICE, model_of
from prompt_views import Seen, dense_pass, kept, output_of, prompt_views
from torch import Tensor

from kvbench.policies import CacheView, Policy, Written

Vector = list[float]


@dataclass(eq=False)
class Head:
    """A KV head of a layer over a prompt. Pairs of dims that RoPE rotates together are neighbours."""

    keys: list[Vector]  # unrotated
    values: list[Vector]
    queries: list[list[Vector]]  # unrotated; by query head, then by token
    frequencies: Vector  # frequency of each pair of dims, in radians per position
    output: list[list[Vector]]  # output weights by query head, then by element of the layer's output

    @cache  # noqa: B019 - the heads of a few prompts
    def rotated_key(self, position: int) -> Vector:
        return rotated(self.keys[position], position, self.frequencies)


Score = Callable[[Head, list[int]], Vector]  # of the tokens at the positions that a head holds, oldest first


def rotated(x: Vector, position: float, frequencies: Vector) -> Vector:
    """RoPE, pair by pair."""
    out = []
    for i, frequency in enumerate(frequencies):
        cosine, sine = math.cos(position * frequency), math.sin(position * frequency)
        first, second = x[2 * i], x[2 * i + 1]
        out += [first * cosine - second * sine, first * sine + second * cosine]
    return out


def dot(x: Vector, y: Vector) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def norm(x: Vector) -> float:
    return math.sqrt(dot(x, x))


def transposed(rows: list[Vector]) -> list[Vector]:
    return [list(column) for column in zip(*rows, strict=True)]


def mean(x: Vector) -> float:
    return sum(x) / len(x)


def softmax(x: Vector) -> Vector:
    weights = [math.exp(a - max(x)) for a in x]
    return [w / sum(weights) for w in weights]


def plain(family: str, tokens: Tensor) -> list[list[list[Head]]]:
    """The heads of each layer and stream. L lists of B lists of H heads."""
    model = model_of(family)
    return [
        [[_head(model, layer, seen, stream, head) for head in range(seen.keys.shape[1])] for stream in range(len(tokens))]
        for layer, seen in sorted(dense_pass(model, tokens).items())
    ]


def _head(model, layer: int, seen: Seen, stream: int, head: int) -> Head:
    parts = (seen.keys[stream, head], seen.values[stream, head], seen.queries[stream, head])
    frequencies = model.layers[layer].rotation.frequencies
    return Head(*(x.tolist() for x in parts), frequencies.tolist(), output_of(model, layer)[head].tolist())


def best(scores: Vector, held: list[int], budget: int) -> list[int]:
    """The positions of the highest (score, rank), in order."""
    order = sorted(range(len(held)), key=lambda i: (scores[i], i))
    return sorted(held[i] for i in order[max(0, len(held) - budget) :])


@dataclass(eq=False)
class Case:
    """A prompt, read by a tiny model: as policies see it, and as lists."""

    tokens: Tensor  # [B, N]
    heads: list[list[list[Head]]]
    family: str = "llama"

    def views(self, policy: Policy) -> list[CacheView]:
        return prompt_views(model_of(self.family), self.tokens, policy)

    def expected(self, score: Score, budget: int) -> list[list[list[list[int]]]]:
        """Return the positions of the prompt that each layer, stream and head keeps."""
        held = list(range(self.tokens.shape[1]))
        return [[[best(worth, held, budget) for worth in heads] for heads in layer] for layer in self.scores(score)]

    @cache  # noqa: B019 - a test asks for several budgets
    def scores(self, score: Score) -> list[list[list[Vector]]]:
        """Return the scores of all tokens of the prompt, by layer, stream and head."""
        held = list(range(self.tokens.shape[1]))
        return [[[score(head, held) for head in heads] for heads in layer] for layer in self.heads]


def keeps(policy: Policy, prompt: Case, score: Score, budgets: list[int]) -> None:
    """Check what a policy keeps of a prompt, and of a shuffled cache after one, two and five more evictions."""
    views = prompt.views(policy)
    for budget in budgets:
        bound = policy.bind(budget)
        assert [kept(bound, view, budget) for view in views] == prompt.expected(score, budget), budget
    for layer, view in enumerate(views):
        later, held = shuffled(view, bound, seed=layer)
        keeps_later(bound, later, held, prompt.heads[layer], score)


def keeps_later(policy: Policy, view: CacheView, held: list[list[list[int]]], heads: list[list[Head]], score: Score) -> None:
    """Check which tokens of a view with slots in any order are the first to go."""
    scores = [[score(*one) for one in zip(*of_stream, strict=True)] for of_stream in zip(heads, held, strict=True)]
    for fewer in (1, 2, 5):
        expected = [
            [best(worth, at, len(at) - fewer) for worth, at in zip(*of_stream, strict=True)]
            for of_stream in zip(scores, held, strict=True)
        ]
        assert kept_of(policy, view, fewer) == expected, fewer


@cache
def read(length: int, seed: int, family: str = "llama") -> Case:
    """Two streams of random tokens, none twice in a stream: their scores would tie but for rounding."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.stack([1 + torch.randperm(95, generator=draw)[:length] for _ in range(2)]).to(DEVICE)
    return Case(tokens, plain(family, tokens), family)


def shuffled(view: CacheView, policy: Policy, seed: int, sinks: int = 4, empty: int = 2) -> tuple[CacheView, list]:
    """Return the cache some steps after evictions, with slots in random order and arbitrary values in empty slots.

    Args:
        view: view after a prompt.
        policy: policy whose statistics the view has.
        seed: seed of the held tokens and their slots. Head h holds h tokens fewer than head 0; all heads hold the newest.
        sinks: number of first tokens that are still held.
        empty: number of empty slots in head 0.

    Returns:
        The view, and the positions that each stream's heads hold, oldest first. B lists of H lists.
    """
    streams, heads, length = view.rank.shape
    draw = torch.Generator().manual_seed(seed)
    most, new, at = length * 2 // 3, copy(view), {}
    slots = most + empty
    held = [[_some(length, most - head, sinks, draw) for head in range(heads)] for _ in range(streams)]
    for name in ("rank", "position", "source"):
        at[name] = torch.full((streams, heads, slots), -1)
    for b in range(streams):
        for h in range(heads):
            places = torch.randperm(slots, generator=draw)
            filled = places[: len(held[b][h])]
            at["rank"][b, h] = slots
            at["rank"][b, h, filled] = torch.arange(len(filled))
            at["position"][b, h, places[len(filled) :][:1]] = 2  # a token that was evicted
            at["position"][b, h, filled] = torch.tensor(held[b][h])
            at["source"][b, h, filled] = torch.tensor(held[b][h])
    new.rank, new.position = at["rank"], at["position"]
    new.keys, new.values = (_gathered(x, at["source"], torch.nan) for x in (view.keys, view.values))
    new.states = {s: _gathered(x, at["source"], 1e9) if s.per == "slot" else x for s, x in view.states.items()}
    for s in policy.statistics:
        written = (
            s.written(Written(view.keys, view.values, view.position, view.position, view.rotate)) if s.per == "head" else None
        )
        if written is not None:
            new.states[s] = _gathered(written, at["source"], 0.0).double().sum(2)
    return new, held


def _some(length: int, number: int, sinks: int, draw: torch.Generator) -> list[int]:
    between = sinks + torch.randperm(length - 1 - sinks, generator=draw)[: number - 1 - sinks]
    return sorted([*range(sinks), *between.tolist(), length - 1])


def _gathered(x: Tensor, source: Tensor, fill: float) -> Tensor:
    extra = (1,) * (x.dim() - 3)
    out = x.take_along_dim(source.clamp(min=0).view(*source.shape, *extra), 2)
    return out.masked_fill((source < 0).view(*source.shape, *extra), fill)


def kept_of(policy: Policy, view: CacheView, fewer: int) -> list[list[list[int]]]:
    """The positions left after `fewer` evictions in every head of a view with slots in any order."""
    importance = policy.importance(view)
    assert not importance.isnan().any()
    return [
        [
            best([w for _, w, _ in tokens], [p for _, _, p in tokens], len(tokens) - fewer)
            for tokens in (
                sorted(
                    (r, w, p)
                    for r, w, p in zip(*(x[b, h].tolist() for x in (view.rank, importance, view.position)), strict=True)
                    if r < view.rank.shape[-1]
                )
                for h in range(view.rank.shape[1])
            )
        ]
        for b in range(view.rank.shape[0])
    ]
