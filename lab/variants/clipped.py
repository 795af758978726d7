"""Clipped softmax: clip((zeta - gamma) softmax(x) + gamma, 0, 1) with gamma < 0, so that a weight can be exactly 0.

Source: Bondarenko et al. 2023, arXiv:2306.12929, Equation 4; gamma = -alpha / T as they recommend, zeta = 1.
Differs: T is the model's training length, also while samples are shorter, so gamma is a constant of the model.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import LlamaConfig

from kvbench.harness.engine.watch import Weighing
from kvbench.lab.variants.base import VariantForCausalLM, register

_ALPHA = 4.0


class ClippedConfig(LlamaConfig):
    """Llama's config with the model type of this variant."""

    model_type = "kv_bench_clipped"

    def attention_weighing(self, module: nn.Module, query: Tensor, scaling: float) -> Weighing:
        """Return the clipped softmax."""
        return clipped(self.max_position_embeddings)


class ClippedForCausalLM(VariantForCausalLM):
    """A Llama whose heads can leave tokens out altogether."""

    config_class = ClippedConfig
    undrivable = "its softmax is clipped, and the decode loop computes a plain one"


def clipped(training_length: int) -> Weighing:
    """Weights that sum to at most 1: n of them above 0 are what the softmax gives these keys, less (n - 1) alpha / T."""
    gamma = -_ALPHA / training_length

    def weights(logits: Tensor) -> Tensor:
        return ((1 - gamma) * logits.softmax(-1) + gamma).clamp(0, 1)

    return Weighing(weights, bounded=True)


register(ClippedForCausalLM)
