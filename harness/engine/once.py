"""Eviction once, after a prompt: everything is held and attended while it is read, then what is worth least goes at once.

Axis letters: B streams, N tokens of the prompt, V vocabulary, R rows (layers x streams x KV heads), S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.slots import Slots


@torch.inference_mode()
def read_once(model: Model, config: CacheConfig, tokens: Tensor, block: int, **how: Any) -> tuple[CachedDecoder, Tensor]:
    """A decoder that has read a prompt under full attention and then kept the `capacity` tokens that are worth most.

    Importance is asked for once, after the prompt's last token, with the statistics of the whole prompt. What is kept closes
    up: in position mode `cache` its ranks are 0, 1, 2 and so on from then. Later steps evict as ever.

    Args:
        model: to drive.
        config: what to keep; a policy that keeps a cache.
        tokens: prompts of one length. [B, N] int64.
        block: tokens that pass a layer at once.
        how: `walk`, `closed` and `compiled` of a decoder.

    Returns:
        The decoder, and the logits after the last token. [B, V].
    """
    streams, length = tokens.shape
    settled = CachedDecoder(model, config, streams, **how)
    whole = settled
    if config.capacity is not None and length > config.capacity:
        whole = CachedDecoder(model, config, streams, **how, room=length)
    for part in tokens.split(block, 1):
        logits = whole(part, keep=torch.full((1,), part.shape[1] - 1, device=tokens.device))
    if whole is not settled:
        for old, new in zip(whole.walks, settled.walks, strict=True):
            _keep_best(old.slots, new.slots, length)
        settled.taken_in(length)
    return settled, logits[:, -1]


def _keep_best(old: Slots, new: Slots, length: int) -> None:
    """Move what is worth most from slots that hold a whole prompt: the highest (importance, rank), lexicographically."""
    rows, into = old.rows(old.empty), new.rows(new.empty)
    assert new.capacity is not None
    rows.view.step = torch.full_like(rows.view.layer, length - 1)
    importance = new.policy.importance(rows.view).flatten(0, 1)
    if old.shape.sliding_window is not None:  # what no later query may see goes first
        importance = importance.masked_fill(rows.view.age.flatten(0, 1) >= old.shape.sliding_window - 1, float("-inf"))
    held = min(length, old.capacity or length)
    by_rank = rows.rank.argsort(-1)[:, :held]  # oldest first, what is empty left out
    order = importance.take_along_dim(by_rank, 1).argsort(dim=-1, stable=True)[:, max(0, held - new.capacity) :]
    kept = by_rank.take_along_dim(order.sort(-1).values, 1)
    for state, target in zip(rows.states.values(), into.states.values(), strict=True):
        flat = state.flatten(0, 1)
        at = kept.view(*kept.shape, *[1] * (flat.dim() - 2))
        target.flatten(0, 1)[:, : kept.shape[1]] = flat.take_along_dim(at, 1)
    keys, values = (x.take_along_dim(kept[..., None], 1) for x in (rows.keys, rows.values))
    into.put(keys, values, rows.position.take_along_dim(kept, 1))
