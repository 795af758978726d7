"""Attention to the window of a block by FlexAttention, which reads whole tiles of keys and skips tiles that no query sees.

FlexAttention is compiled once for each shape of its arguments. Keys are therefore padded to whole tiles. Numbers that differ
between blocks of one shape (keys before the block, width of the window) are passed to the mask as tensors. Padding comes after
every query, so the mask excludes padding like any future token.

Axis letters: B streams, H KV heads, G query heads of a KV head, T tokens of the block, L keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.closed_form import TILE

_DEVICES = {"cuda"}
_MIN_DIM, _MAX_DIM = 16, 256  # of a head; inductor refuses smaller heads, and has no configuration for larger ones
_MAX_SHAPES = 1024  # number of compilations in one process


def can_be_flex(query: Tensor, values: Tensor, terms: Terms) -> bool:
    """Return whether FlexAttention supports the arguments: on CUDA, whole tiles of queries, equal K and V dims of 16 to 256."""
    tokens, dim = query.shape[3:]
    is_standard = terms.softcap is None and terms.sink_logits is None and query.dtype != torch.float64
    fits = dim == values.shape[-1] and _MIN_DIM <= dim <= _MAX_DIM and tokens % TILE == 0
    return is_standard and fits and query.device.type in _DEVICES


def whole_tiles(keys: int) -> int:
    """Return the smallest multiple of a tile that is at least `keys`."""
    return -(-keys // TILE) * TILE


def flex(query: Tensor, keys: Tensor, values: Tensor, padding: int, window: int, terms: Terms) -> tuple[Tensor, Tensor]:
    """Compute the attention of each query to its own token and to the `window` tokens before.

    Args:
        query: rotated. [B, H, G, T, D].
        keys: rotated keys: before the block, of the block, and `padding` keys. [B, H, L, D].
        values: finite values, also for the padding. [B, H, L, D].
        padding: number of keys at the end that belong to no token.
        window: number of tokens before a query that the query sees.

    Returns:
        Output [B, H, G, T, D], and log-sum-exp of the scores [B, H, G, T] float32.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: FlexAttention was compiled for too many shapes, after which PyTorch would
            run it uncompiled, with all scores in memory.
    """
    shape, length = query.shape, keys.shape[2]
    before = length - padding - shape[3]
    if length % TILE:
        keys, values = (pad(x, (0, 0, 0, whole_tiles(length) - length)) for x in (keys, values))
    mask = _block_mask(shape[3], keys.shape[2], before, window, query.device)
    with torch._dynamo.config.patch(recompile_limit=_MAX_SHAPES, accumulated_recompile_limit=_MAX_SHAPES):
        out, extra = _compiled(query.device.type)(
            query.flatten(1, 2).contiguous(),
            keys.contiguous(),
            values.contiguous(),
            block_mask=mask,
            scale=terms.scaling,
            enable_gqa=shape[2] > 1,
        )
    log_sum: Tensor = getattr(extra, "lse", extra)
    return out.view(shape), log_sum.view(shape[:4])


@lru_cache
def _compiled(kind: str) -> Callable[..., Any]:
    """Return FlexAttention with the log-sum-exp as second result, compiled for a kind of device."""
    from torch.nn.attention import flex_attention as module

    request = getattr(module, "AuxRequest", None)  # PyTorch 2.9 and later
    options: dict[str, Any] = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
    # With `fullgraph`, PyTorch raises an error instead of running uncompiled.
    attention = module.flex_attention if kind == "cpu" else torch.compile(module.flex_attention, dynamic=False, fullgraph=True)
    return partial(attention, **options)


@lru_cache(maxsize=16)
def _block_mask(tokens: int, length: int, before: int, window: int, device: torch.device) -> Any:
    """Return the band as a block mask of FlexAttention. The ages at a tile's corners decide whether the tile is needed.

    Args:
        tokens: T, whole tiles.
        length: number of padded keys, whole tiles.
        before: number of keys before the block.
        window: number of tokens before a query that the query sees.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first, reach = (torch.full((), x, dtype=torch.int32, device=device) for x in (before, window))

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        age = first + query - key
        return (age >= 0) & (age <= reach)

    queries = torch.arange(0, tokens, TILE, device=device)[:, None]
    keys = torch.arange(0, length, TILE, device=device)
    lowest, highest = before + queries - keys - (TILE - 1), before + queries - keys + (TILE - 1)  # ages in a tile
    whole = (lowest >= 0) & (highest <= window)
    part = (highest >= 0) & (lowest <= window) & ~whole
    return BlockMask.from_kv_blocks(*_listed(part), *_listed(whole), BLOCK_SIZE=TILE, mask_mod=is_visible)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of needed tiles [1, 1, rows], and their indices, first in each row [1, 1, rows, columns]. int32."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
