"""Attention over a block during which nothing is evicted, and the terms that all attention code here shares.

Axis letters: B streams, H KV heads, G query heads of a KV head, N = B * H, T tokens, L keys, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_MAX_SCORES = 2**24  # held in memory at once by `causal`
_FUSED_QUERIES = 256  # at once, where the kernel holds no scores
_CUDA = {"cuda"}
_FLASH_DTYPES, _FLASH_MAX_DIM = (torch.bfloat16, torch.float16), 256  # of PyTorch's FlashAttention


class Terms(NamedTuple):
    """The parameters of a layer's attention besides q, k and v, as the model passed them."""

    scaling: float
    sliding_window: int | None = None  # tokens a query sees, itself included
    softcap: float | None = None  # score = softcap * tanh(score / softcap)
    sink_logits: Tensor | None = None  # a learned logit per query head that joins the softmax without a value. [H * G]


def weights(scores: Tensor, terms: Terms, heads: int, seen: Tensor | None = None) -> Tensor:
    """Softmax over the keys, in float32 or wider. [N, G, L] -> [N, G, L].

    Args:
        scores: scaled dot products, rows ordered (stream, head).
        terms: their softcap and sink logits are applied here.
        heads: H, to arrange the sink logits.
        seen: keys that may be attended; all when None. Broadcasts to [N, G, L], bool.
    """
    if scores.dtype.itemsize < 4:
        scores = scores.float()
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if terms.sink_logits is None:
        return torch.softmax(scores, -1)
    sink = terms.sink_logits.to(scores.dtype).view(1, heads, -1, 1)
    sink = sink.expand(scores.shape[0] // heads, -1, -1, -1).reshape(scores.shape[0], -1, 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]


def causal(query: Tensor, keys: Tensor, values: Tensor, terms: Terms, padding: Tensor | None = None) -> Tensor:
    """Causal attention of the last T of L tokens, in chunks of queries.

    Args:
        query: rotated. [B, H, G, T, D].
        keys: rotated. [B, H, L, D].
        values: [B, H, L, Dv].
        terms: of this layer's attention.
        padding: number of padding tokens at the start of each stream; none when None. Their output is finite but
            meaningless. [B] int64.

    Returns:
        [B, H, G, T, Dv], dtype of the query.
    """
    tokens, length, group = query.shape[3], keys.shape[2], query.shape[2]
    plain = padding is None and terms == Terms(terms.scaling)
    if group > 1 and _needs_equal_heads(query, values, terms, plain):
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return causal(query.flatten(1, 2)[:, :, None], keys, values, terms, padding).view(*query.shape[:4], -1)
    if plain and (tokens == length or query.device.type in _CUDA):
        flat, mask = query.flatten(1, 2), None if tokens == length else _lower_right(tokens, length)
        out = scaled_dot_product_attention(
            flat, keys, values, mask, is_causal=mask is None, scale=terms.scaling, enable_gqa=flat.shape[1] > keys.shape[1]
        )
        return out.view(*query.shape[:4], values.shape[3])
    rows = max(1, _MAX_SCORES // (query.shape[:3].numel() * length))
    if terms.softcap is None and terms.sink_logits is None:
        rows = max(rows, min(tokens, _FUSED_QUERIES))
    chunks = [
        _causal_chunk(query[:, :, :, t : t + rows], keys, values, length - tokens + t, terms, padding)
        for t in range(0, tokens, rows)
    ]
    return torch.cat(chunks, 3)


def _lower_right(tokens: int, length: int) -> Tensor:
    """The causal mask of the last T of L tokens, as a name for it that FlashAttention understands."""
    from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler, which takes a second

    return causal_lower_right(tokens, length)


def _needs_equal_heads(query: Tensor, values: Tensor, terms: Terms, plain: bool) -> bool:
    """Whether a fused kernel takes this on CUDA only if there are as many KV heads as query heads.

    FlashAttention takes groups of query heads, but only 16-bit types and no mask but the causal one; the memory-efficient kernel
    takes masks and float32, but no groups (up to PyTorch 2.13; `sdp_utils.cpp`); cuDNN may be off. Where none of them takes a
    call, PyTorch computes all scores.
    """
    flash = plain and query.dtype in _FLASH_DTYPES and query.shape[4] == values.shape[3] <= _FLASH_MAX_DIM
    return query.device.type in _CUDA and terms.softcap is None and terms.sink_logits is None and not flash


def _causal_chunk(query: Tensor, keys: Tensor, values: Tensor, first: int, terms: Terms, padding: Tensor | None) -> Tensor:
    """Causal attention of the queries at positions `first`, `first + 1`, ..."""
    streams, heads, group, tokens, _ = query.shape
    low = 0 if terms.sliding_window is None else max(0, first - terms.sliding_window + 1)
    keys, values = keys[:, :, low : first + tokens], values[:, :, low : first + tokens]
    age = (
        torch.arange(first, first + tokens, device=query.device)[:, None]
        - torch.arange(low, first + tokens, device=query.device)
    )  # fmt: skip
    seen = age >= 0 if terms.sliding_window is None else (age >= 0) & (age < terms.sliding_window)
    if padding is not None:  # a padding query attends to itself, because softmax over no keys is NaN
        token = torch.arange(low, first + tokens, device=query.device) >= padding[:, None, None]  # [B, 1, L]
        seen = ((seen & token) | (age == 0))[:, None]  # [B, 1, T, L]
    if terms.softcap is None and terms.sink_logits is None:
        flat = query.flatten(1, 2)
        out = scaled_dot_product_attention(flat, keys, values, seen, scale=terms.scaling, enable_gqa=group > 1)
        return out.view(streams, heads, group, tokens, -1)
    scores = torch.einsum("bhgtd,bhld->bhgtl", query * terms.scaling, keys)
    if terms.sink_logits is not None:  # one logit per row
        terms = terms._replace(sink_logits=terms.sink_logits.repeat_interleave(tokens))
    if padding is not None:
        seen = seen.expand(-1, heads, -1, -1).flatten(0, 1)  # [N, T, L]
    rows = torch.cat([seen] * group, -2)  # [G * T, L], or [N, G * T, L] with padding
    mass = weights(scores.flatten(0, 1).flatten(1, 2), terms, heads, rows).view(scores.shape)
    return torch.einsum("bhgtl,bhld->bhgtd", mass.to(values.dtype), values)
