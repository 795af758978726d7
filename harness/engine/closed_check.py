"""The check that guards the closed form: a stretch of tokens past the first evictions, both ways."""

from __future__ import annotations

import torch

from harness.engine.loop import CacheConfig, CachedDecoder
from harness.engine.model import Model

_PAST = 256  # tokens past the point where the cache is full
_BLOCK = 96
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the logits' scale
_ROUNDING_16_BITS = 4e-2


def closed_form_differs(model: Model, config: CacheConfig) -> float | None:
    """By how much the closed form differs from the walk, in units of what is rounding; None where there is no closed form.

    Random tokens are read until the cache is full, and 256 more, in blocks; the logits of the last ones are compared.

    Args:
        model: of the cell.
        config: of the cell.
    """
    closed = CachedDecoder(model, config)
    if not any(walk.has_closed_form for walk in closed.walks):
        return None
    assert config.capacity is not None
    walked = CachedDecoder(model, config, closed=False)
    vocabulary = model.hf.config.get_text_config().vocab_size
    count = config.capacity + _PAST
    tokens = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(1)).to(model.device)
    worst = 0.0
    for block in [tokens[:, : config.capacity], *tokens[:, config.capacity :].split(_BLOCK, 1)]:
        keep = torch.arange(max(0, block.shape[1] - _BLOCK), block.shape[1], device=model.device)
        ours, theirs = (read(block, keep=keep).float() for read in (closed, walked))
        scale = _ROUNDING.get(model.dtype, _ROUNDING_16_BITS) * theirs.abs().amax().clamp(min=1)
        worst = max(worst, float(((ours - theirs).abs().amax() / scale).nan_to_num(torch.inf)))
    return worst
