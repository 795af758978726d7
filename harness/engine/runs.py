"""Runs: tokens during which nothing is evicted, read through one layer in one attention call.

The numbers are those of the walk. Ranks say who sees whom: a token sees all that are held before it, and itself.

Axis letters: B streams, H KV heads, N = B * H rows, G query heads of a KV head, T tokens of the run, S slots, D key dim,
Dv value dim, P pairs of dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.harness.engine.attention import Terms, weights
from kvbench.harness.engine.plan import Places
from kvbench.harness.engine.rotary import LONGEST_STREAM, Rotation, rotate
from kvbench.harness.engine.rows import Rows
from kvbench.policies import PositionMode, Seen

_MAX_SCORES = 2**24  # held in memory at once


class Run(NamedTuple):
    """A run in the rows of one layer."""

    query: Tensor  # unrotated, unscaled, paired. [N, G, T, D]
    keys: Tensor  # unrotated, paired. [N, T, D]
    values: Tensor  # [N, T, Dv]
    steps: Tensor  # [N, T] int64
    ids: Tensor  # [N, T] int64


def read_run(
    rows: Rows,
    run: Run,
    first: int,
    places: Places,
    terms: Terms,
    mode: PositionMode,
    rotation: Rotation | None,
    updates: bool,
    due: bool,
) -> Tensor:
    """Take a run into one layer.

    Args:
        rows: of the layer, with room for the run.
        run: to take in.
        first: index in the block of its first token.
        places: of the block's tokens.
        terms: of this layer's attention.
        mode: where RoPE puts a cached token; `clamped` only as long as nothing is farther away than the limit.
        rotation: of the layer.
        updates: statistics see the attention of each token.
        due: tokens are evicted after the run.

    Returns:
        [N, G, T, Dv].
    """
    size, tokens = run.steps.shape
    ranks = rows.count()[:, None] + torch.arange(tokens, device=run.steps.device)
    free = rows.empty_slots(tokens)
    rows.enter(free, run.keys, run.values, ranks, run.steps)
    asked = rows.asked if updates else frozenset[Seen]()
    explicit = bool(asked) or terms.softcap is not None or terms.sink_logits is not None
    scaling = terms.scaling if explicit else 1  # rounded once, together with the rotation
    query, keys = run.query, rows.keys
    if rotation is not None:
        places_of_keys, own = (rows.rank, ranks) if mode == "cache" else (rows.position.clamp(min=0), run.steps)
        keys = rotate(keys, rotation.factors(places_of_keys, keys.dtype, LONGEST_STREAM))
        query = rotate(query, rotation.factors(own, keys.dtype, LONGEST_STREAM)[:, None] * scaling)
    elif scaling != 1:
        query = query * scaling
    sees = rows.seen_by(ranks, run.steps)
    if updates:
        rows.leave(free)
    at_once = max(1, _MAX_SCORES // (size * query.shape[1] * keys.shape[1]))
    out = []
    for start in range(0, tokens, at_once):
        part = slice(start, min(start + at_once, tokens))
        if explicit:
            answer, seen = _attend(query[:, :, part], keys, rows.values, sees[:, part], terms, rows.heads, asked)
        else:
            answer, seen = _attend_by_kernel(query[:, :, part], keys, rows.values, sees[:, part], terms.scaling), {}
        out.append(answer)
        if updates:
            seen["queries"] = run.query[:, :, part]
            for t in range(start, part.stop):
                now = {name: seen[name][:, :, t - start] for name in asked}
                rows.free.copy_(free[:, t])
                rows.place(ranks[:, t], run.steps[:, t], places.now[first + t])
                token = slice(t, t + 1)
                rows.note_written(
                    free[:, token], run.keys[:, token], run.values[:, token], run.steps[:, token], run.ids[:, token]
                )
                rows.update(now, None)
    if not updates:
        rows.view.step = places.now[first + tokens - 1]
        rows.note_written(free, run.keys, run.values, run.steps, run.ids)
    rows.end_run(free, due)
    return torch.cat(out, 2)


def _attend_by_kernel(query: Tensor, keys: Tensor, values: Tensor, sees: Tensor, scaling: float) -> Tensor:
    """Attention where nobody wants its weights. [N, G, T, D], [N, S, D], [N, S, Dv], [N, T, S] -> [N, G, T, Dv]."""
    one_head = keys[:, None], values[:, None], sees[:, None]
    return scaled_dot_product_attention(query, *one_head, scale=scaling, enable_gqa=query.shape[1] > 1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, sees: Tensor, terms: Terms, heads: int, asked: frozenset[Seen]
) -> tuple[Tensor, dict[Seen, Tensor]]:
    """Attention of some queries, with all its scores.

    Args:
        query: rotated and scaled. [N, G, T, D].
        keys: rotated. [N, S, D].
        values: [N, S, Dv].
        sees: [N, T, S] bool.
        terms: of this layer's attention.
        heads: H.
        asked: what statistics read.

    Returns:
        The output [N, G, T, Dv], and weights, logits [N, G, T, S] and outputs as asked.
    """
    group, tokens = query.shape[1:3]
    flat, mask = query.flatten(1, 2), sees.repeat(1, group, 1)  # [N, G * T, ...]
    scores = torch.bmm(flat, keys.mT)
    if terms.sink_logits is not None:  # one logit per row
        terms = terms._replace(sink_logits=terms.sink_logits.repeat_interleave(tokens))
    mass = weights(scores, terms, heads, mask)
    out = torch.bmm(mass.to(values.dtype), values).unflatten(1, (group, tokens))
    seen: dict[Seen, Tensor] = {"weights": mass.unflatten(1, (group, tokens)), "outputs": out}
    if "logits" in asked:
        seen["logits"] = logits_of(scores, terms).masked_fill(~mask, -torch.inf).unflatten(1, (group, tokens))
    return out, seen


def logits_of(scores: Tensor, terms: Terms) -> Tensor:
    """Scores as the softmax takes them. Any shape; float32 or wider."""
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    return scores if terms.softcap is None else torch.tanh(scores / terms.softcap) * terms.softcap
