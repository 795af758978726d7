"""Banded attention of a block: every query sees the first tokens of the stream and a window of the newest.

This is the closed form of the walk, for policies whose kept tokens are known in advance. A key in the window is at its true
distance from the query; the position mode decides the distance of a sink. The queries are therefore rotated twice, and the two
parts of the softmax are merged by their log-sum-exp. The score matrix of a whole block is never in memory. On CPUs, PyTorch's
fused kernel computes chunks of queries; on CUDA, FlexAttention computes the whole block (`kernels/flex_blocks.py`).

Axis letters: B streams, H KV heads, G query heads of a KV head, T tokens of the block, L keys, E sinks, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, can_fuse, fused_attention, weights

_MIN_CHUNK, _MAX_CHUNK = 64, 128  # bounds of the queries in a chunk, which are as many as the window's tokens


class Sinks(NamedTuple):
    """The first tokens of the stream, for queries whose window no longer covers them."""

    query: Tensor  # the block's queries, rotated for the distance to the sinks. [B, H, G, T, D]
    keys: Tensor  # rotated. [B, H, E, D]
    values: Tensor  # [B, H, E, Dv]


def banded(query: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Sinks | None, terms: Terms, first: int) -> Tensor:
    """Compute the attention of each query to its own token, to the `window` tokens before, and to sinks before the window.

    Args:
        query: rotated. [B, H, G, T, D].
        keys: rotated keys of the block and of the tokens just before it. [B, H, L, D].
        values: [B, H, L, Dv].
        window: number of tokens before a query that the query sees.
        sinks: tokens at positions 0, 1, ...; None without sinks.
        terms: other parameters of the attention; a sliding window is ignored.
        first: position of the first key.

    Returns:
        [B, H, G, T, Dv], dtype of the query.
    """
    tokens, before = query.shape[3], keys.shape[2] - query.shape[3]
    start = first + before - window  # position at which the first query's window starts
    outside = None if sinks is None else outside_windows(sinks, tokens, start)
    rows = min(max(_MIN_CHUNK, window), _MAX_CHUNK)
    by_kernel = can_fuse(query, values, terms)
    out, log_sums = [], []
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        low = max(0, before + start - window)
        chunk, part = slice(start, stop), slice(low, before + stop)
        size = (stop - start, before + start - low, window)
        if by_kernel:
            mask = _additive_mask(*size, query.shape[2], query.dtype)
            near, log_sum = fused_attention(query[:, :, :, chunk], keys[:, :, part], values[:, :, part], terms.scaling, mask)
            log_sums.append(log_sum)
        else:
            visible = _band(*size, query.device)
            chunk_sinks = None if sinks is None else sinks._replace(query=sinks.query[:, :, :, chunk])
            chunk_outside = None if outside is None else outside[chunk]
            near = _with_all_scores(
                query[:, :, :, chunk], keys[:, :, part], values[:, :, part], visible, chunk_sinks, chunk_outside, terms
            )
        out.append(near)
    near = torch.cat(out, 3)
    if sinks is None or outside is None or not by_kernel:
        return near
    return merged(near, torch.cat(log_sums, 3), sinks, outside, terms)


@lru_cache(maxsize=16)
def _band(tokens: int, before: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of a band over L = before + T keys: a query sees its own key and the `window` keys before. [T, L] bool."""
    age = torch.arange(before, before + tokens, device=device)[:, None] - torch.arange(before + tokens, device=device)
    return (age >= 0) & (age <= window)


@lru_cache(maxsize=16)
def _additive_mask(tokens: int, before: int, window: int, group: int, dtype: torch.dtype) -> Tensor:
    """`_band` as a mask to add to scores, repeated for every query head of a KV head. [G * T, L]."""
    visible = _band(tokens, before, window, torch.device("cpu"))
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf).repeat(group, 1)


def _with_all_scores(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, sinks: Sinks | None, outside: Tensor | None, terms: Terms
) -> Tensor:
    """Compute attention with all scores in memory. visible: [T, L] bool; outside: sinks before the window, [T, E] bool."""
    tokens, heads = query.shape[3], query.shape[1]
    scores = torch.einsum("bhgtd,bhld->bhgtl", query * terms.scaling, keys)
    if sinks is not None and outside is not None:
        far = torch.einsum("bhgtd,bhed->bhgte", sinks.query * terms.scaling, sinks.keys)
        scores, visible = torch.cat([far, scores], -1), torch.cat([outside, visible], -1)
        values = torch.cat([sinks.values, values], 2)
    if terms.sink_logits is not None:  # one logit per row
        terms = terms._replace(sink_logits=terms.sink_logits.repeat_interleave(tokens))
    flat = scores.flatten(0, 1).flatten(1, 2)
    mass = weights(flat, terms, heads, visible.repeat(query.shape[2], 1)).view(scores.shape)
    return torch.einsum("bhgtl,bhld->bhgtd", mass.to(values.dtype), values)


def merged(near: Tensor, log_sum: Tensor, sinks: Sinks, outside: Tensor, terms: Terms) -> Tensor:
    """Merge the window's attention with the sinks' into one softmax, in float32 or wider.

    Args:
        near: [B, H, G, T, Dv].
        log_sum: [B, H, G, T], float32 or wider.
        outside: sinks before a query's window. [T, E] bool.

    Returns:
        [B, H, G, T, Dv].
    """
    if near.dtype.itemsize >= 4:
        return _joined(near, log_sum, sinks, outside, terms)
    float32_sinks = Sinks(sinks.query, sinks.keys.float(), sinks.values.float())
    parts = zip(
        near.split(_MAX_CHUNK, 3),
        log_sum.split(_MAX_CHUNK, 3),
        sinks.query.split(_MAX_CHUNK, 3),
        outside.split(_MAX_CHUNK),
        strict=True,
    )
    joined = (_joined(x.float(), y, float32_sinks._replace(query=q.float()), mask, terms) for x, y, q, mask in parts)
    return torch.cat([x.to(near.dtype) for x in joined], 3)


def _joined(near: Tensor, log_sum: Tensor, sinks: Sinks, outside: Tensor, terms: Terms) -> Tensor:
    """`merged` in one dtype."""
    keys, values = sinks.keys[:, :, None].mT * terms.scaling, sinks.values[:, :, None]
    far = (sinks.query @ keys).masked_fill(~outside, -torch.inf)
    share = torch.cat([log_sum[..., None], far], -1).softmax(-1)  # share of the window, then of every sink
    return share[..., :1] * near + share[..., 1:] @ values


def outside_windows(sinks: Sinks, tokens: int, start: int) -> Tensor:
    """Return the sinks before each query's window. start: first position of the first query's window. [T, E] bool."""
    windows = torch.arange(start, start + tokens, device=sinks.keys.device)
    return torch.arange(sinks.keys.shape[2], device=sinks.keys.device) < windows[:, None]
