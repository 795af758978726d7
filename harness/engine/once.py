"""Eviction once, after a prompt: everything is held and attended while it is read, then what is worth least goes at once.

Axis letters: B streams, N tokens of the prompt, V vocabulary, R rows (layers x streams x KV heads), S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.rows import effective_importance
from kvbench.harness.engine.slots import Slots


@torch.inference_mode()
def read_once(
    model: Model, config: CacheConfig, tokens: Tensor, block: int, method: Method = EAGER
) -> tuple[CachedDecoder, Tensor]:
    """A decoder that has read a prompt under full attention and then kept the `capacity` tokens that are worth most.

    Importance is asked for once, after the prompt's last token, with the statistics of the whole prompt. What is kept closes
    up: in position mode `cache` its ranks are 0, 1, 2 and so on from then. Later steps evict as usual.

    Args:
        model: to drive.
        config: what to keep; a policy that keeps a cache.
        tokens: prompts of one length. [B, N] int64.
        block: tokens that pass a layer at once.
        method: shortcuts that may be taken.

    Returns:
        The decoder, and the logits after the last token. [B, V].
    """
    streams, length = tokens.shape
    read = CachedDecoder(model, config, streams, method)
    reader = read
    if config.capacity is not None and length > config.capacity:
        reader = CachedDecoder(model, config, streams, method, prompt_length=length)
    for part in tokens.split(block, 1):
        logits = reader(part, keep=torch.full((1,), part.shape[1] - 1, device=tokens.device))
    if reader is not read:
        for whole, kept in zip(reader.walks, read.walks, strict=True):
            _keep_best(whole.slots, kept.slots, length)
        read.mark_prefilled(length)
    return read, logits[:, -1]


def _keep_best(whole: Slots, kept: Slots, length: int) -> None:
    """Copy what is worth most out of slots that hold a whole prompt: the highest (importance, rank), lexicographically."""
    assert kept.capacity is not None
    rows, into = whole.rows(whole.num_slots), kept.rows(kept.num_slots)
    rows.view.step = torch.full_like(rows.view.layer, length - 1)
    importance = effective_importance(kept.policy, rows.view, whole.shape.sliding_window)
    held = min(length, whole.capacity or length)
    by_rank = rows.rank.argsort(-1)[:, :held]  # oldest first, empty slots left out
    order = importance.take_along_dim(by_rank, 1).argsort(dim=-1, stable=True)[:, max(0, held - kept.capacity) :]
    best = by_rank.take_along_dim(order.sort(-1).values, 1)
    for state, target in zip(rows.states.values(), into.states.values(), strict=True):
        flat = state.flatten(0, 1)
        at = best.view(*best.shape, *[1] * (flat.dim() - 2))
        target.flatten(0, 1)[:, : best.shape[1]] = flat.take_along_dim(at, 1)
    keys, values = (x.take_along_dim(best[..., None], 1) for x in (rows.keys, rows.values))
    into.put(keys, values, rows.position.take_along_dim(best, 1))
