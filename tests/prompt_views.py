"""The definition of what a policy sees after a prompt: dense attention, and every statistic updated token by token.

It shares with the engine the hook into the model and the tables of RoPE, and nothing else.

Axis letters: B streams, H KV heads, G query heads of a KV head, N tokens of the prompt, D key dim.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.rotary import rotate
from kvbench.policies import Attention, CacheView, HeadSizes, Policy, Written


@dataclass
class Seen:
    """Attention of a layer over a whole prompt."""

    queries: Tensor  # unrotated, engine's order of dims. [B, H, G, N, D]
    keys: Tensor  # unrotated, engine's order of dims. [B, H, N, D]
    values: Tensor  # [B, H, N, Dv]
    logits: Tensor  # -inf for later keys. [B, H, G, N, N]
    outputs: Tensor  # [B, H, G, N, Dv]

    @cached_property
    def weights(self) -> Tensor:
        """[B, H, G, N, N]."""
        return self.logits.softmax(-1)


@dataclass
class DensePass:
    """Answers a model's attention densely, and remembers it."""

    model: Model
    layers: dict[int, Seen] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """[B, H * G, N, D], [B, H, N, D], [B, H, N, Dv] -> [B, H * G, N, Dv]."""
        turn, pair = rotation_of(self.model, layer), self.model.layers[layer].rotation
        query, keys = (x if pair is None else pair.pair(x) for x in (query, keys))
        query = query.unflatten(1, (keys.shape[1], -1))
        at = torch.arange(keys.shape[2], device=keys.device)
        rotated_query, rotated_keys = turn(query, at.expand(query.shape[:-1])), turn(keys, at.expand(keys.shape[:-1]))
        logits = torch.einsum("bhgnd,bhmd->bhgnm", rotated_query, rotated_keys).float() * terms.scaling
        logits = logits.masked_fill(at > at[:, None], -torch.inf)
        outputs = torch.einsum("bhgnm,bhmd->bhgnd", logits.softmax(-1).to(values.dtype), values)
        self.layers[layer] = Seen(query, keys, values, logits, outputs)
        return outputs.flatten(1, 2)


def rotation_of(model: Model, layer: int):
    """RoPE of a layer as `CacheView.rotate` has it."""
    rotation = model.layers[layer].rotation

    def turn(x: Tensor, position: Tensor) -> Tensor:
        if rotation is None:
            return x
        return rotate(x.contiguous(), rotation.factors(position.expand(x.shape[:-1]), x.dtype, 2**24))

    return turn


def dense_pass(model: Model, tokens: Tensor) -> dict[int, Seen]:
    """Attention of every layer over a prompt. tokens: [B, N] int64."""
    backend = DensePass(model)
    with torch.inference_mode():
        model(tokens, backend)
    return backend.layers


def prompt_views(model: Model, tokens: Tensor, policy: Policy, seed: int = 0) -> list[CacheView]:
    """Return the view of every layer that a bound policy gets after a prompt. tokens: [B, N] int64."""
    with torch.inference_mode():
        return [_view(model, layer, seen, tokens, policy, seed) for layer, seen in sorted(dense_pass(model, tokens).items())]


def _view(model: Model, layer: int, seen: Seen, tokens: Tensor, policy: Policy, seed: int) -> CacheView:
    streams, heads, length, dim = seen.keys.shape
    at, device = torch.arange(length, device=tokens.device), tokens.device
    everywhere, stream = at.expand(streams, heads, -1), torch.ones(streams, 1, 1, dtype=torch.int64, device=device)
    view = CacheView(
        everywhere,
        everywhere,
        stream,
        seen.keys,
        seen.values,
        {},
        stream * layer,
        torch.arange(heads, device=device)[:, None],
        stream * length,
        len(model.layers),
        seed,
        rotation_of(model, layer),
    )
    ids = tokens[:, None].expand(-1, heads, -1)
    written = Written(seen.keys, seen.values, view.position, ids, view.rotate, output_of(model, layer))
    sizes = HeadSizes(seen.queries.shape[2], dim, seen.values.shape[-1])
    first = {s: s.written(written) for s in policy.statistics}
    for s in policy.statistics:
        shape = (*view.rank.shape[: 3 if s.per == "slot" else 2], *s.shape(sizes))
        view.states[s] = torch.full(shape, s.initial, dtype=torch.float32 if s.per == "slot" else torch.float64, device=device)
    for t in range(length):
        view.step = torch.full_like(view.step, t)
        view.rank = torch.where(at <= t, at, length).expand(streams, heads, -1)
        view.position = torch.where(at <= t, at, -1).expand(streams, heads, -1)
        step = Attention(
            weights=seen.weights[:, :, :, t],
            logits=seen.logits[:, :, :, t],
            queries=seen.queries[:, :, :, t],
            outputs=seen.outputs[:, :, :, t],
        )
        for s, state in view.states.items():
            value = first[s]
            if s.per == "slot":
                state[:, :, t] = s.initial if value is None else value[:, :, t]
            elif value is not None:
                state += value[:, :, t]
            if s.sees:
                view.states[s] = s.update(state, step, view)
    return view


def output_of(model: Model, layer: int) -> Tensor | None:
    """The output projection of a llama-like layer, by KV head. [H, G, E, Dv]."""
    shape = model.layers[layer]
    weight = model.hf.base_model.layers[layer].self_attn.o_proj.weight
    return weight.unflatten(1, (shape.heads, shape.group, -1)).permute(1, 2, 0, 3)


def kept(policy: Policy, view: CacheView, budget: int | Tensor) -> list[list[list[int]]]:
    """Positions that survive the prompt's end: the highest (importance, rank). budget: tokens, or [B, H] int64."""
    importance = policy.importance(view)
    counts = budget if isinstance(budget, Tensor) else torch.full(importance.shape[:2], budget)
    return [
        [
            sorted(sorted(range(len(worth)), key=lambda i: (worth[i], i))[max(0, len(worth) - int(count)) :])
            for worth, count in zip(of_stream, numbers, strict=True)
        ]
        for of_stream, numbers in zip(importance.tolist(), counts, strict=True)
    ]
