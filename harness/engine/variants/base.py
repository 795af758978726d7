"""Base class of Llamas with another attention.

A variant is a model type of its own, so that transformers alone, which would leave its difference out, can't load it by mistake.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

_SOFTMAX = ("eager", "sdpa")  # transformers' own attention, which leaves out what a variant adds


class Variant:
    """A model with another attention than transformers' model of its family; stands before that among the bases.

    Attributes:
        own_attention: registered function that computes its attention as its paper has it.
    """

    own_attention: ClassVar[str]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of the family
        if self.own_attention not in _SOFTMAX and config._attn_implementation in _SOFTMAX:
            self.set_attn_implementation(self.own_attention)  # type: ignore[attr-defined]


class VariantForCausalLM(Variant, LlamaForCausalLM):
    """A Llama with another attention."""


def register(model: Any) -> None:
    """Make a variant, which has a config class of its own, known to transformers' Auto classes."""
    config = model.config_class
    assert config is not None
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
