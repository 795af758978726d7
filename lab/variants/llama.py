"""Llamas whose attention differs in one thing: weights that are no softmax, learned sink logits, or a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from kvbench.harness.engine.watch import Weighing
from kvbench.lab.variants.base import VariantForCausalLM, register

_ALPHA = 4.0  # of clipped softmax


class SinkLogitsConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_sink_logits"


class _SinkLogitsAttention(LlamaAttention):
    """Hands its sink logits on as gpt-oss does, so that the decode loop takes them, too."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))  # logits. [Q]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # what it lists is handed on
        return super().forward(*args, **kwargs | {"s_aux": self.sinks})


class SinkLogitsForCausalLM(VariantForCausalLM):
    """A Llama with a learned sink logit for every query head of every layer: it joins a softmax without a value.

    Source: OpenAI 2025, gpt-oss-120b and gpt-oss-20b model card, arXiv:2508.10925; `sinks` of transformers' GptOssAttention.
    Differs: they begin at 0, as the softmax off by one of Miller 2023, which they generalise.
    """

    config_class = SinkLogitsConfig
    attention_class = _SinkLogitsAttention


class SigmoidConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_sigmoid"

    def attention_weighing(self, module: nn.Module, query: Tensor, scaling: float) -> Weighing:
        """Return sigmoids."""
        return Weighing(torch.sigmoid, bounded=False)


class SigmoidForCausalLM(VariantForCausalLM):
    """A Llama whose weights are sigmoid(q k / sqrt(D)), whatever they sum to. No weight depends on another.

    Source: Gu et al. 2024, arXiv:2410.10781, the section on other operations than softmax: no sinks up to 1B parameters.
    Differs: nothing known. Ramapuram et al. 2024, arXiv:2409.04431, add a bias of -log T to the logits; this has none.
    """

    config_class = SigmoidConfig
    undrivable = "its attention weights are sigmoids, not a softmax, so they are no shares that a policy could rank or lose"


class GatedConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_gated"


class _GatedAttention(LlamaAttention):
    """Llama's attention with a sigmoid gate before the output projection."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)

    def forward(  # type: ignore[override]  # what it lists is handed on
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, E] -> [B, T, E]."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
        gate = torch.sigmoid(self.gate_proj(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        name = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get(name, llama.eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1) * gate), weights


class GatedForCausalLM(VariantForCausalLM):
    """A Llama in which what attention returns is multiplied, element by element, by sigmoids of the layer's input.

    Source: Qiu et al. 2025, arXiv:2505.06708: Y * sigmoid(X W), where Y is the softmax attention of all heads, before the output
        projection (their position G1), and X what the queries are computed from; every head and element has a gate of its own.
    """

    config_class = GatedConfig
    attention_class = _GatedAttention
    own_attention = "eager"


class ClippedConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_clipped"

    def attention_weighing(self, module: nn.Module, query: Tensor, scaling: float) -> Weighing:
        """Return the clipped softmax."""
        return clipped(self.max_position_embeddings)


class ClippedForCausalLM(VariantForCausalLM):
    """A Llama with clip((zeta - gamma) softmax(x) + gamma, 0, 1), gamma < 0, whose heads can leave tokens out altogether.

    Source: Bondarenko et al. 2023, arXiv:2306.12929, Equation 4; gamma = -alpha / T as they recommend, zeta = 1.
    Differs: T is the model's training length, also while samples are shorter, so gamma is a constant of the model.
    """

    config_class = ClippedConfig
    undrivable = "its softmax is clipped, and the decode loop computes a plain one"


def clipped(training_length: int) -> Weighing:
    """Weights that sum to at most 1: n of them above 0 are what the softmax gives these keys, less (n - 1) alpha / T."""
    gamma = -_ALPHA / training_length

    def weights(logits: Tensor) -> Tensor:
        return ((1 - gamma) * logits.softmax(-1) + gamma).clamp(0, 1)

    return Weighing(weights, bounded=True)


for _variant in (SinkLogitsForCausalLM, SigmoidForCausalLM, GatedForCausalLM, ClippedForCausalLM):
    register(_variant)
