"""Sigmoid attention without normalisation: weights are sigmoid(q k / sqrt(D)), whatever they sum to.

Source: Gu et al. 2024, arXiv:2410.10781, the section on attention operations other than softmax: no sinks up to 1B parameters.
Differs: nothing known. Ramapuram et al. 2024, arXiv:2409.04431, add a bias of -log T to the logits; this has none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from kvbench.harness.engine.watch import Weighing
from kvbench.lab.variants.base import VariantForCausalLM, register


class SigmoidConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_sigmoid"

    def attention_weighing(self, module: nn.Module, query: Tensor, scaling: float) -> Weighing:
        """Return sigmoids."""
        return Weighing(torch.sigmoid, bounded=False)


class SigmoidForCausalLM(VariantForCausalLM):
    """A Llama in which no weight depends on another."""

    config_class = SigmoidConfig
    undrivable = "its attention weights are sigmoids, not a softmax, so they are no shares that a policy could rank or lose"


register(SigmoidForCausalLM)
