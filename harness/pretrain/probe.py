"""How much of its attention a model gives to the first token: what an attention sink looks like from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

_NAME = "kv_bench_probe"
_FROM = 64  # queries from this place on: to the first ones the first token is no choice
_shares: list[Tensor] = []  # of the layers of the pass under way. [Q]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Plain causal attention that notes the weight of the first token. [B, Q, T, D], [B, H, T, D] -> [B, T, Q, D]."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril(), -torch.inf)
    if getattr(module.config, "zero_sink", False):
        scores = torch.cat([scores, scores.new_zeros(*scores.shape[:3], 1)], -1)
    weights = scores.float().softmax(-1)[..., :tokens].to(value.dtype)
    _shares.append(weights[:, :, _FROM:, 0].float().mean((0, 2)))
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


@contextmanager
def _probing(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    _shares.clear()
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def attention_to_first(model: PreTrainedModel, samples: Tensor) -> Tensor:
    """Mean softmax weight that each head gives to the first token, over queries from the 64th on.

    Args:
        model: to be looked at; left as it was.
        samples: [B, T] int64, T > 64.

    Returns:
        [L, Q] float32.
    """
    training = model.training
    model.eval()
    with _probing(model):
        model(input_ids=samples, use_cache=False)
        found = torch.stack(list(_shares))
    model.train(training)
    return found
