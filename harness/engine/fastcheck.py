"""The check that guards what is faster than the plain walk: a stretch of tokens past the first evictions, both ways."""

from __future__ import annotations

from typing import NamedTuple

import torch

from harness.engine.loop import CacheConfig, CachedDecoder
from harness.engine.model import Model

_PAST = 256  # tokens past the point where the cache is full
_BLOCK = 96
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the logits' scale
_ROUNDING_16_BITS = 4e-2


class FastCheck(NamedTuple):
    """What a cell's blocks are computed by, and how far that is from the plain walk, in units of what is rounding."""

    method: str  # "closed form", "compiled walk" or "walk"
    differs: float


def fast_method(model: Model, config: CacheConfig) -> FastCheck:
    """The fastest way of reading blocks that agrees with the plain walk.

    Random tokens are read until the cache is full, and 256 more, in blocks; the logits of the last ones are compared. In 16
    bits a policy that looks at attention may choose another victim within rounding, and what follows is another cache: there
    the compiled walk is compared before the first eviction and 32 tokens past it, no farther.

    Args:
        model: of the cell.
        config: of the cell; a policy that evicts.
    """
    assert config.capacity is not None
    fast = CachedDecoder(model, config, compiled=True)
    closed, compiled = any(w.has_closed_form for w in fast.walks), any(w.is_compiled for w in fast.walks)
    if not closed and not compiled:
        return FastCheck("walk", 0.0)
    plain = CachedDecoder(model, config, closed=False)
    past = _PAST if closed or model.dtype in _ROUNDING else 32
    vocabulary = model.hf.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, config.capacity + past), generator=torch.Generator().manual_seed(1)).to(model.device)
    worst = 0.0
    for block in [tokens[:, : config.capacity], *tokens[:, config.capacity :].split(_BLOCK, 1)]:
        keep = torch.arange(max(0, block.shape[1] - _BLOCK), block.shape[1], device=model.device)
        ours, theirs = (read(block, keep=keep).float() for read in (fast, plain))
        scale = _ROUNDING.get(model.dtype, _ROUNDING_16_BITS) * theirs.abs().amax().clamp(min=1)
        worst = max(worst, float(((ours - theirs).abs().amax() / scale).nan_to_num(torch.inf)))
    if not worst <= 1:
        return FastCheck("walk", worst)
    return FastCheck("closed form" if closed else "compiled walk", worst)
