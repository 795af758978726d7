"""The kernels of `triton_rotate.py` as functions of tensors. Where they don't serve, the plain code is used.

Axis letters: B streams, H KV heads, G query heads of a KV head, N = B * H * G, T tokens, E sinks, D head dim, P = D / 2 pairs.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.engine.rotary import Rotation

_DEVICES = {"cuda"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ELEMENTS = 2048  # of each kind of vector that a program holds
_MIN_TOKENS, _MAX_TOKENS = 8, 128  # of a program


@lru_cache
def _kernels() -> Any:
    """The module with the kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from kvbench.harness.kernels import triton_rotate

    return triton_rotate


def serves(x: Tensor) -> bool:
    """Whether the kernels can take queries, keys and values like these. [..., D]."""
    return x.device.type in _DEVICES and x.dtype in _DTYPES and x.shape[-1] % 2 == 0 and _kernels() is not None


def sizes(dim: int) -> dict[str, int]:
    """Constants of the kernels for a head dim."""
    pairs = 1 << (max(dim // 2, 1) - 1).bit_length()
    tokens = max(_MIN_TOKENS, min(_MAX_TOKENS, _ELEMENTS // (2 * pairs)))
    return {"D": dim, "P": pairs, "BLOCK": tokens}


def pairing(rotation: Rotation | None, x: Tensor) -> tuple[Tensor, int]:
    """Vectors as the model makes them, in an order that the kernels read, and which one. [..., D] -> [..., D], HALVES."""
    if rotation is None:
        return x, 0
    return (x, rotation.halves) if rotation.halves else (x.index_select(-1, rotation.order), 0)


def rotate_into(out: Tensor, x: Tensor, factors: Tensor | None, halves: int = 0) -> None:
    """Write vectors, paired and rotated.

    Args:
        out: dims contiguous. [B, N, T, D].
        x: [B, N, T, D].
        factors: of the tokens; None: only paired. [T, P] complex64.
        halves: 0 if paired dims of `x` are neighbours; else dim p of the first 2 * halves is paired with dim p + halves.
    """
    streams, heads, tokens, dim = x.shape
    if not tokens:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    constants = sizes(dim)
    _kernels().rotate[(streams * heads, ceil(tokens / constants["BLOCK"]))](
        x,
        _numbers(factors, x),
        out,
        *x.stride()[:3],
        *out.stride()[:3],
        heads,
        tokens,
        ROTATES=factors is not None,
        HALVES=halves,
        **constants,
    )


def merge(
    near: Tensor,
    log_sum: Tensor,
    query: Tensor,
    factors: Tensor | None,
    halves: int,
    keys: Tensor,
    values: Tensor,
    gap: int,
    scaling: float,
) -> Tensor:
    """Merge a window's attention with that of the sinks, whose scores stay in float32.

    Args:
        near: overwritten. [B, H, G, T, D].
        log_sum: [B, H, G, T] float32.
        query: unrotated. [B, H, G, T, D].
        factors: of the queries, for the distance to the sinks; None without RoPE. [T, P] complex64.
        halves: of the query, as in `rotate_into`.
        keys: rotated, paired dims side by side. [B, H, E, D].
        values: [B, H, E, D].
        gap: query t sees sink e apart from its window where e < t + gap.

    Returns:
        [B, H, G, T, D].
    """
    group, tokens, dim = query.shape[2:]
    query, near, constants = query.flatten(1, 2), near.contiguous(), sizes(dim)
    query = query if query.stride(-1) == 1 else query.contiguous()
    streams, heads = query.shape[:2]
    _kernels().merge[(streams * heads, ceil(tokens / constants["BLOCK"]))](
        query,
        _numbers(factors, query),
        keys.contiguous(),
        values.contiguous(),
        near,
        log_sum.contiguous(),
        near,
        *query.stride()[:3],
        heads,
        group,
        tokens,
        keys.shape[2],
        gap,
        scaling,
        ROTATES=factors is not None,
        HALVES=halves,
        **constants,
    )
    return near


def _numbers(factors: Tensor | None, unused: Tensor) -> Tensor:
    """Factors as cos and sin. [T, P] complex64 -> [T, P, 2] float32; `unused` stands in for none."""
    return unused if factors is None else torch.view_as_real(factors.contiguous())
