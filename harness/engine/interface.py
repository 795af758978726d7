"""The attention function that an unmodified Hugging Face model calls.

The model runs with `use_cache=False`, without a mask function, and with all position ids 0, where RoPE does nothing. So this
function gets the plain q, k and v of the new tokens and does everything after. The backend is a context variable, because some
model families don't pass keyword arguments on to their attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
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
    if s_aux is None and getattr(module.config, "zero_sink", False):  # softmax off by one is a sink logit of 0
        terms = terms._replace(sink_logits=query.new_zeros(query.shape[1]))
    layer: Any = module.layer_idx
    attend = _opaque if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, layer, *terms), None


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float, sliding_window: int | None, softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of one layer, by the backend of the current forward pass. [B, Q, T, D] and so on -> [B, T, Q, Dv]."""
    terms = Terms(scaling, sliding_window, softcap, sink_logits)
    return BACKEND.get().attend(layer, query, keys, values, terms).transpose(1, 2).contiguous()


def _empty_answer(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    """A tensor like what `_attend` returns, for the compiler."""
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])


@contextmanager
def answered_by(backend: Backend) -> Iterator[None]:
    """Let a backend compute the attention of forward passes."""
    token = BACKEND.set(backend)
    try:
        yield
    finally:
        BACKEND.reset(token)


BACKEND: ContextVar[Backend] = ContextVar("backend")  # of the current forward pass
AttentionInterface.register(NAME, _attention)
# The same as an operation that a compiler doesn't look into. What the backend writes to its cache is no business of the graph:
# the order of layers follows from what they return.
_opaque = torch.library.custom_op(
    "kv_bench::attend", _attend, mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, int layer, float scaling, int? sliding_window, float? softcap, "
    "Tensor? sink_logits) -> Tensor",
)  # fmt: skip
_opaque.register_fake(_empty_answer)
