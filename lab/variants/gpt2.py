"""A GPT-2 whose attention differs in one thing: other weights than a softmax, a key bias, or queries and keys with a norm.

Sources:
    relu: Guo et al. 2024, arXiv:2410.13835, and `attn_use_relu` of their code: a query's weights are the positive parts of its
        logits over the number of its keys.
    sigmoid, sigmoid_shares, elu, elu_shares, key_bias: Gu et al. 2024, arXiv:2410.10781, and `model_attn_sim.py`,
        `model_kv_bias.py` of their code. `shares` are divided by their sum.
    pseudo: the pseudo-attention of StableMask, Yin et al. 2024, arXiv:2402.04779: hidden keys have logits that fall with their
        position, and a weight that goes nowhere. Differs: it falls by 1 over the longest text, not by their rate.
    protected: He et al. 2024, arXiv:2405.19279: no norm before attention and MLP, but one of queries and keys. Differs: residual
        branches are small by their initial weights alone, GPT-2's, and the last norm stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from kvbench.harness.engine.watch import Weighing, nonzero
from kvbench.lab.variants.base import Variant, register, softmax
from kvbench.lab.variants.llama import clipped

_KEY_BIAS_DEVIATION = 0.02  # as published


def _relu(logits: Tensor) -> Tensor:
    return logits.clamp(min=0) / logits.isfinite().sum(-1, keepdim=True)


def _elu(logits: Tensor) -> Tensor:
    return elu(logits) + 1


def _shares(weights: Callable[[Tensor], Tensor]) -> Weighing:
    def normalised(logits: Tensor) -> Tensor:
        positive = weights(logits)
        return positive / nonzero(positive.sum(-1, keepdim=True))

    return Weighing(normalised, bounded=True)


def _pseudo(longest: int) -> Weighing:
    hidden = [math.exp(-position / longest) for position in range(longest)]
    left = torch.tensor([sum(hidden[count:]) for count in range(longest + 1)]).log()  # for a query with `count` keys

    def weights(logits: Tensor) -> Tensor:
        rest = left.to(logits)[logits.isfinite().sum(-1, keepdim=True)]
        return torch.cat([logits, rest], -1).softmax(-1)[..., :-1]

    return Weighing(weights, bounded=True)


WEIGHINGS: dict[str, Callable[[int], Weighing]] = {  # by name in a recipe; of the training length
    "relu": lambda _: Weighing(_relu, bounded=False),
    "sigmoid": lambda _: Weighing(torch.sigmoid, bounded=False),
    "sigmoid_shares": lambda _: _shares(torch.sigmoid),
    "elu": lambda _: Weighing(_elu, bounded=False),
    "elu_shares": lambda _: _shares(_elu),
    "clipped": clipped,
    "pseudo": _pseudo,
}
SOFTMAXES = ("key_bias", "qk_norm", "protected")  # names of the others


class WeighedGPT2Config(GPT2Config):
    """GPT-2's config and the kind of attention: one of `WEIGHINGS` or `SOFTMAXES`."""

    model_type = "kv_bench_gpt2"
    weighing: str = "relu"

    def attention_weighing(self, module: nn.Module, query: Tensor, scaling: float) -> Weighing | None:
        """Return how weights follow from logits; None for a softmax over the keys alone."""
        if self.weighing == "key_bias":
            bias: Any = module.key_bias  # [Q, D]
            sinks = (query * bias[:, None]).sum(-1) * scaling
            return Weighing(lambda logits: softmax(logits, sinks), bounded=True)
        return None if self.weighing in SOFTMAXES else WEIGHINGS[self.weighing](self.max_position_embeddings)


class _NormedProjection(Conv1D):
    """Queries, keys and values, with an RMSNorm of each head's queries and keys. [B, T, E] -> [B, T, 3 E]."""

    def __init__(self, config: GPT2Config, plain: Conv1D) -> None:
        super().__init__(3 * config.hidden_size, config.hidden_size)  # type: ignore[no-untyped-call]
        self.load_state_dict(plain.state_dict())
        width = config.hidden_size // config.num_attention_heads
        self.q_norm, self.k_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = super().forward(x).chunk(3, -1)  # type: ignore[no-untyped-call]
        heads = (-1, self.q_norm.normalized_shape[0])
        query, key = (norm(y.unflatten(-1, heads)).flatten(-2) for norm, y in ((self.q_norm, query), (self.k_norm, key)))
        return torch.cat([query, key, value], -1)


class WeighedGPT2ForCausalLM(Variant, GPT2LMHeadModel):
    """A GPT-2 with another attention."""

    config_class = WeighedGPT2Config
    undrivable = "its attention weights are no softmax of GPT-2's logits, which is what the decode loop computes"

    def __init__(self, config: WeighedGPT2Config) -> None:
        super().__init__(config)
        blocks: Any = self.transformer.h
        for block in blocks:
            if config.weighing == "key_bias":
                width = config.hidden_size // config.num_attention_heads
                drawn = torch.randn(config.num_attention_heads, width) * _KEY_BIAS_DEVIATION
                block.attn.key_bias = nn.Parameter(drawn)
            if config.weighing in ("qk_norm", "protected"):
                block.attn.c_attn = _NormedProjection(config, block.attn.c_attn)
            if config.weighing == "protected":
                block.ln_1 = block.ln_2 = nn.Identity()


register(WeighedGPT2ForCausalLM)
