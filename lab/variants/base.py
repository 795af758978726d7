"""Shared code of all variants of Llama and GPT-2: their base classes, a plain attention function, and their registration.

A variant is a model type of its own, so that transformers alone, which would leave its difference out, can't load it by mistake.
A variant whose weights are no softmax has a config with the method `attention_weighing` (`harness/engine/watch.py`).

Axis letters: B streams, T tokens, Q query heads, H KV heads, D head dim, L keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from kvbench.harness.engine.watch import weighing_of

NAME = "kv_bench_variant"
_SOFTMAX = ("eager", "sdpa")  # transformers' own attention, which leaves out what a variant adds


class Variant:
    """A model with another attention than transformers' model of its family; stands before that among the bases.

    Attributes:
        own_attention: registered function that computes its attention as its paper has it.
        undrivable: why the decode loop can't drive it; None if it can.
    """

    own_attention: ClassVar[str] = NAME
    undrivable: ClassVar[str | None] = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of the family
        if self.own_attention not in _SOFTMAX and config._attn_implementation in _SOFTMAX:
            self.set_attn_implementation(self.own_attention)  # type: ignore[attr-defined]


class VariantForCausalLM(Variant, LlamaForCausalLM):
    """A Llama with another attention.

    Attributes:
        attention_class: module that replaces every layer's attention; None: the layers stay Llama's.
    """

    attention_class: ClassVar[type[LlamaAttention] | None] = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.attention_class is not None:
            for index, layer in enumerate(self.model.layers):
                layer.self_attn = self.attention_class(config, index)
            self.post_init()  # type: ignore[no-untyped-call]


def register(model: Any) -> None:
    """Make a variant, which has a config class of its own, known to transformers' Auto classes."""
    config = model.config_class
    assert config is not None
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a variant, all logits at once. [B, Q, T, D], [B, H, T, D] -> [B, T, Q, D]."""
    return weighed(attention_weights(module, query, key, scaling, s_aux), value), None


def attention_weights(module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sink_logits: Tensor | None) -> Tensor:
    """Weights of causal attention, a variant's or plain. [B, Q, T, D], [B, H, T, D], [Q] -> [B, Q, T, T], at least float32."""
    tokens = query.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query @ key.mT * scaling
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    logits = logits.masked_fill(~visible, -torch.inf)
    weighing = weighing_of(module, query, scaling)
    if weighing is not None:
        return weighing.weights(logits)
    sinks = None if sink_logits is None else sink_logits[:, None].expand(query.shape[:3])
    return softmax(logits, sinks)


def weighed(weights: Tensor, value: Tensor) -> Tensor:
    """The output of attention with these weights. [B, Q, T, T], [B, H, T, Dv] -> [B, T, Q, Dv]."""
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys and a query's sink, if any, without the sink's weight. [B, Q, T, L], [B, Q, T] -> [B, Q, T, L]."""
    if sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, sinks.to(logits.dtype)[..., None]], -1).softmax(-1)[..., :-1]


AttentionInterface.register(NAME, _attention)
