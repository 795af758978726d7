"""Llamas and GPT-2s whose attention differs in one thing, each a model type and a file. A new one is named here.

`lab/entry_points.txt` names their model types, so that the harness imports a variant when it reads the config of one.
"""

from __future__ import annotations

from transformers import LlamaForCausalLM

from kvbench.lab.variants.clipped import ClippedForCausalLM
from kvbench.lab.variants.gated import GatedForCausalLM
from kvbench.lab.variants.sigmoid import SigmoidForCausalLM
from kvbench.lab.variants.sink_logits import SinkLogitsForCausalLM

VARIANTS: dict[str, type[LlamaForCausalLM]] = {  # by name in a recipe
    "sink_logits": SinkLogitsForCausalLM,
    "sigmoid": SigmoidForCausalLM,
    "gated": GatedForCausalLM,
    "clipped": ClippedForCausalLM,
}
