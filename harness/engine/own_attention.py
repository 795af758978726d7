"""Switch the function that computes a model's attention: one registered with transformers, or the model's own.

Softmax off by one is registered here, because transformers has no function for it. Its weights may sum to less than one, as if a
token with K = V = 0 came first. A model enables it in its config (`zero_sink: true`). Pretraining and the self-check use this
function. The decode loop computes the same result with a sink logit of 0.

Source: Miller 2023, "Attention is off by one"; Xiao et al. 2023, arXiv:2309.17453, Equation 2 and Table 3 ("zero sink").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from kvbench.harness.engine.attention import implemented_by

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


@contextmanager
def attention_by(hf: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a registered function compute a model's attention in this context.

    Raises:
        ValueError: the model family does not support the function.
    """
    with implemented_by(hf._check_and_adjust_attn_implementation(name, is_init_check=False)):
        yield


def own_attention(hf: PreTrainedModel) -> AbstractContextManager[None]:
    """Run a model with the attention of its authors in this context, for a reference forward pass.

    A model class may name a function that is registered with transformers in its attribute `own_attention`.
    """
    if name := getattr(hf, "own_attention", None):
        return attention_by(hf, name)
    zero_sink = getattr(hf.config.get_text_config(), "zero_sink", False)  # transformers has no attention for it
    return attention_by(hf, ZERO_SINK if zero_sink else "eager")
