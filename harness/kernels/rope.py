"""The kernels of `triton_rotate.py` as functions of tensors. PyTorch code is used where the kernels don't support a tensor.

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
_ELEMENTS = 2048  # elements of each kind of vector that a program holds
_MIN_TOKENS, _MAX_TOKENS = 8, 128  # per program


@lru_cache
def _kernels() -> Any:
    """Return the module with the kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from kvbench.harness.kernels import triton_rotate

    return triton_rotate


def serves(x: Tensor) -> bool:
    """Return whether the kernels support queries, keys and values like `x`. [..., D]."""
    return x.device.type in _DEVICES and x.dtype in _DTYPES and x.shape[-1] % 2 == 0 and _kernels() is not None


def sizes(dim: int) -> dict[str, int]:
    """Return the kernels' constants for a head dim."""
    pairs = 1 << (max(dim // 2, 1) - 1).bit_length()
    tokens = max(_MIN_TOKENS, min(_MAX_TOKENS, _ELEMENTS // (2 * pairs)))
    return {"D": dim, "P": pairs, "BLOCK": tokens}


def pairing(rotation: Rotation | None, x: Tensor) -> tuple[Tensor, int]:
    """Return vectors in an order of dims that the kernels support, and the pairing of dims. [..., D] -> [..., D], HALVES.

    x: as the model computes it.
    """
    if rotation is None:
        return x, 0
    return (x, rotation.halves) if rotation.halves else (x.index_select(-1, rotation.order), 0)


def rotate_into(out: Tensor, x: Tensor, factors: Tensor | None, halves: int = 0) -> None:
    """Pair the dims of vectors, rotate the vectors, and write them.

    Args:
        out: receives the vectors; dims contiguous. [B, N, T, D].
        x: [B, N, T, D].
        factors: RoPE of the tokens; None only pairs dims. [T, P] complex64.
        halves: 0 if paired dims of `x` are adjacent. Otherwise, of the first 2 * halves dims, p is paired with p + halves.
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
    """Merge attention to the window with attention to the sinks, whose scores stay in float32.

    Args:
        near: attention to the window, which is overwritten. [B, H, G, T, D].
        log_sum: log-sum-exp of the window's scores. [B, H, G, T] float32.
        query: unrotated. [B, H, G, T, D].
        factors: RoPE of the queries, for the distance to the sinks; None without RoPE. [T, P] complex64.
        halves: pairing of the query's dims, as in `rotate_into`.
        keys: rotated keys of the sinks, paired dims adjacent. [B, H, E, D].
        values: values of the sinks. [B, H, E, D].
        gap: sink e is before the window of query t if e < t + gap.

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
    """Return factors as cos and sin; `unused` if there are none. [T, P] complex64 -> [T, P, 2] float32."""
    return unused if factors is None else torch.view_as_real(factors.contiguous())
