"""Shared code of all variants of Llama and GPT-2: a plain attention function, and their registration.

A variant is a model type of its own, so that transformers alone, which would leave its difference out, can't load it by mistake.

Axis letters: B streams, T tokens, Q query heads, H KV heads, D head dim, L keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

NAME = "kv_bench_variant"
_SOFTMAX = ("eager", "sdpa")  # transformers' own attention, which leaves out what a variant adds


@dataclass(frozen=True)
class Weighing:
    """How attention weights follow from logits, where that is no softmax.

    Attributes:
        weights: of a query's logits, those of hidden keys at -inf. [..., L] -> [..., L].
        bounded: a query's weights sum to at most 1, and the rest goes to no token. If not, they may sum to anything.
    """

    weights: Callable[[Tensor], Tensor]
    bounded: bool

    def shares(self, weights: Tensor) -> Tensor:
        """The part of a query's attention that each key gets: the weights, or their share of an unbounded sum. [..., L]."""
        return weights if self.bounded else weights / nonzero(weights.sum(-1, keepdim=True))


def nonzero(sums: Tensor) -> Tensor:
    """Sums to divide by: weights that are all 0 have shares of 0."""
    return sums.masked_fill(sums == 0, 1)


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
    """A Llama with another attention."""


_WEIGHINGS: dict[str, Callable[[Any], Weighing | None]] = {}  # by model type; of a config


def register(model: Any, weighing: Callable[[Any], Weighing | None] | None = None) -> None:
    """Make a variant known to transformers' Auto classes.

    Args:
        model: class of a variant, with a config class of its own.
        weighing: how weights follow from logits, given its config; None, or None for a config, for a softmax.
    """
    config = model.config_class
    assert config is not None
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    if weighing is not None:
        _WEIGHINGS[config.model_type] = weighing


def weighing_of(config: Any) -> Weighing | None:
    """How a model's attention weights follow from its logits; None if by a softmax."""
    weighing = _WEIGHINGS.get(getattr(config, "model_type", ""))
    return None if weighing is None else weighing(config)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    dropout: float = 0.0, scaling: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention of a variant, all logits at once. [B, Q, T, D], [B, H, T, D] -> [B, T, Q, D]."""
    return weighed(attention_weights(module, query, key, scaling, s_aux), value), None


def attention_weights(
    module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sink_logits: Tensor | None
) -> Tensor:  # fmt: skip
    """Weights of causal attention, a variant's or plain. [B, Q, T, D], [B, H, T, D], [Q] -> [B, Q, T, T], at least float32."""
    tokens = query.shape[2]
    lags = getattr(module, "later_source", None) is not None  # no token sees itself, and the first one nothing
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query @ key.mT * scaling
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril(-1 if lags else 0)
    logits = logits.masked_fill(~seen, -torch.inf)
    weighing = weighing_of(module.config)
    if weighing is not None:
        return weighing.weights(logits)
    weights = softmax(logits, sinks_of(module, query, scaling, sink_logits))
    return weights.masked_fill(~seen, 0.0) if lags else weights


def weighed(weights: Tensor, value: Tensor) -> Tensor:
    """The output of attention with these weights. [B, Q, T, T], [B, H, T, Dv] -> [B, T, Q, Dv]."""
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


def sinks_of(module: nn.Module, query: Tensor, scaling: float, sink_logits: Tensor | None) -> Tensor | None:
    """Return the logit that joins a query's softmax without a value: query times key bias, or one per head. [B, Q, T]."""
    bias = getattr(module, "key_bias", None)  # [Q, D]
    if bias is not None:
        return (query * bias[:, None]).sum(-1) * scaling  # type: ignore[no-any-return]
    return None if sink_logits is None else sink_logits[:, None].expand(query.shape[:3])


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys and a query's sink, if any, without the sink's weight. [B, Q, T, L], [B, Q, T] -> [B, Q, T, L]."""
    if sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, sinks.to(logits.dtype)[..., None]], -1).softmax(-1)[..., :-1]


AttentionInterface.register(NAME, _attention)
