"""The attention function that an unmodified Hugging Face model calls.

The model runs with `use_cache=False`, without a mask function, and with all position ids 0, where RoPE does nothing. So this
function gets the plain q, k and v of the new tokens and does everything after. The backend is a context variable, because some
model families don't pass keyword arguments on to their attention.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from kvbench.harness.engine.attention import Terms

NAME = "kv_bench"


class Backend(Protocol):
    """Computes the attention of a model's layers."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Attention of one layer. [B, Q, T, D], [B, H, T, D], [B, H, T, Dv] -> [B, Q, T, Dv]."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers."""
    terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    layer: Any = module.layer_idx
    if s_aux is None and getattr(module.config, "zero_sink", False):  # softmax off by one is a sink logit of 0
        terms = terms._replace(sink_logits=query.new_zeros(query.shape[1]))
    return BACKEND.get().attend(layer, query, key, value, terms).transpose(1, 2).contiguous(), None


BACKEND: ContextVar[Backend] = ContextVar("backend")  # of the current forward pass
AttentionInterface.register(NAME, _attention)
