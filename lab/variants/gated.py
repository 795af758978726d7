"""Gated attention: what attention returns is multiplied, element by element, by sigmoids of the layer's input.

Source: Qiu et al. 2025, arXiv:2505.06708: Y * sigmoid(X W), where Y is the softmax attention of all heads, before the output
    projection (their position G1), and X what the queries are computed from; every head and element has a gate of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvbench.lab.variants.base import VariantForCausalLM, register


class GatedConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_gated"


class _Attention(llama.LlamaAttention):
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
    """A Llama with a gate in every layer's attention."""

    config_class = GatedConfig
    own_attention = "eager"

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = _Attention(config, index)
        self.post_init()  # type: ignore[no-untyped-call]


register(GatedForCausalLM)
