"""Llamas and GPT-2s whose attention differs in one thing, each a model type. A new one is named here.

`lab/entry_points.txt` names their model types, so that the harness imports a variant when it reads the config of one.
"""

from __future__ import annotations

from transformers import LlamaForCausalLM

from kvbench.lab.variants.llama import ClippedForCausalLM, GatedForCausalLM, SigmoidForCausalLM, SinkLogitsForCausalLM

VARIANTS: dict[str, type[LlamaForCausalLM]] = {  # by name in a recipe
    "sink_logits": SinkLogitsForCausalLM,
    "sigmoid": SigmoidForCausalLM,
    "gated": GatedForCausalLM,
    "clipped": ClippedForCausalLM,
}
