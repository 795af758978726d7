"""A GPT-2 whose attention is no softmax: sigmoids, a clipped softmax, or ReLU.

Source, of ReLU: Guo et al. 2024, arXiv:2410.13835, and `attn_use_relu` of their code: a query's weights are the positive parts of
    its logits over the number of its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from kvbench.harness.engine.variants import clipped
from kvbench.harness.engine.variants.base import Variant, Weighing, register


def _relu(logits: Tensor) -> Tensor:
    return logits.clamp(min=0) / logits.isfinite().sum(-1, keepdim=True)


WEIGHINGS: dict[str, Callable[[Any], Weighing]] = {  # by name in a recipe; of a config
    "relu": lambda _: Weighing(_relu, bounded=False),
    "sigmoid": lambda _: Weighing(torch.sigmoid, bounded=False),
    "clipped": clipped.weighing,
}


class WeighedGPT2Config(GPT2Config):
    """That of a GPT-2, and how its weights follow from logits: one of `WEIGHINGS`."""

    model_type = "kv_bench_gpt2"
    weighing: str = "relu"


class WeighedGPT2ForCausalLM(Variant, GPT2LMHeadModel):
    """A GPT-2 with weights of another kind."""

    config_class = WeighedGPT2Config
    undrivable = "its attention weights are no softmax, which is what the decode loop computes"


register(WeighedGPT2ForCausalLM, lambda config: WEIGHINGS[config.weighing](config))
