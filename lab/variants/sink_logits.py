"""Learned sink logits: every query head has a logit that joins its softmax without a value.

Source: OpenAI 2025, gpt-oss-120b and gpt-oss-20b model card, arXiv:2508.10925; `sinks` of transformers' GptOssAttention.
Differs: they begin at 0, as the softmax off by one of Miller 2023, which they generalise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from kvbench.lab.variants.base import VariantForCausalLM, register


class SinkLogitsConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_sink_logits"


class _Attention(LlamaAttention):
    """Hands its sink logits on as gpt-oss does, so that the decode loop takes them, too."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))  # logits. [Q]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # what it lists is handed on
        return super().forward(*args, **kwargs | {"s_aux": self.sinks})


class SinkLogitsForCausalLM(VariantForCausalLM):
    """A Llama with a learned sink logit for every query head of every layer."""

    config_class = SinkLogitsConfig

    def __init__(self, config: SinkLogitsConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = _Attention(config, index)
        self.post_init()  # type: ignore[no-untyped-call]


register(SinkLogitsForCausalLM)
