"""Softmax off by one: attention whose weights may sum to less than one, as if a token with K = V = 0 came first.

Source: Miller 2023, "Attention is off by one"; Xiao et al. 2023, arXiv:2309.17453, Equation 2 and Table 3 ("zero sink").
A model enables it in its config (`zero_sink: true`). Pretraining and the self-check use this function. The decode loop computes
the same result with a sink logit of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ZERO_SINK = "kv_bench_zero_sink"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention with a token of zeros before the text. [B, Q, T, D], [B, H, T, D] -> [B, T, Q, D]."""
    tokens = query.shape[2]
    key, value = (torch.cat([x.new_zeros(*x.shape[:2], 1, x.shape[3]), x], 2) for x in (key, value))
    visible = torch.ones(tokens, tokens + 1, dtype=torch.bool, device=query.device).tril(1)
    out = scaled_dot_product_attention(query, key, value, visible, scale=scaling, enable_gqa=query.shape[1] > key.shape[1])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ZERO_SINK, _attention)
