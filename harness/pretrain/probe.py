"""Measures a model during training: the attention it gives to the first token, and the answers it gets right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.engine.variants.base import attention_weights, weighed, weighing_of

_NAME = "kv_bench_probe"
_FIRST_QUERY = 64  # earlier queries have too few keys to choose from
_layer_shares: list[Tensor] = []  # filled by `_attention`, one [Q] per layer of the current forward pass


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    dropout: float = 0.0, scaling: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention that records the weight of the first token. [B, Q, T, D], [B, H, T, D] -> [B, T, Q, D]."""
    if getattr(module.config, "zero_sink", False):
        s_aux = query.new_zeros(query.shape[1])
    weights, weighing = attention_weights(module, query, key, scaling, s_aux), weighing_of(module.config)
    shares = weights.to(value.dtype) if weighing is None else weighing.shares(weights.to(value.dtype))
    _layer_shares.append(shares[:, :, _FIRST_QUERY:, 0].float().mean((0, 2)))
    return weighed(weights, value), None


AttentionInterface.register(_NAME, _attention)


@torch.inference_mode()
def attention_to_first(model: PreTrainedModel, samples: Tensor) -> Tensor:
    """Mean softmax weight that each query head gives to the first token, over queries from the 64th on.

    Args:
        model: its mode and attention implementation are restored afterwards.
        samples: [B, T] int64, T > 64.

    Returns:
        [L, Q] float32.
    """
    training = model.training
    model.eval()
    _layer_shares.clear()
    with attention_by(model, _NAME):
        model(input_ids=samples, use_cache=False)
        shares = torch.stack(list(_layer_shares))
    model.train(training)
    return shares


@torch.inference_mode()
def right_answers(model: PreTrainedModel, samples: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sample: answers of which the model predicts every token, given the text before it; and all. [B], [B].

    Args:
        model: in any mode, which it keeps.
        samples: [B, T] int64.
        answers: whether a token belongs to an answer. [B, T] bool.
    """
    training = model.training
    model.eval()
    right = model(input_ids=samples, use_cache=False).logits[:, :-1].argmax(-1) == samples[:, 1:]
    model.train(training)
    asked = answers[:, 1:]
    starts = asked & ~answers[:, :-1]
    number = starts.flatten().cumsum(0)[asked.flatten()] - 1  # of the answer that a token belongs to
    wrong = (~right).flatten()[asked.flatten()].float()
    is_right = wrong.new_zeros(int(starts.sum())).index_add_(0, number, wrong) == 0
    sample = starts.nonzero()[:, 0]  # of each answer
    return torch.bincount(sample[is_right], minlength=len(samples)), starts.sum(1)
