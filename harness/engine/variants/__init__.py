"""Llamas whose attention differs in one thing, each a model type and a file. A new one is named here."""

from __future__ import annotations

from kvbench.harness.engine.variants.base import VariantForCausalLM
from kvbench.harness.engine.variants.clipped import ClippedForCausalLM
from kvbench.harness.engine.variants.gated import GatedForCausalLM
from kvbench.harness.engine.variants.gpt2 import WeighedGPT2ForCausalLM as WeighedGPT2ForCausalLM
from kvbench.harness.engine.variants.lckv import LCKVForCausalLM
from kvbench.harness.engine.variants.sigmoid import SigmoidForCausalLM
from kvbench.harness.engine.variants.sink_logits import SinkLogitsForCausalLM

VARIANTS: dict[str, type[VariantForCausalLM]] = {  # by name in a recipe
    "sink_logits": SinkLogitsForCausalLM,
    "sigmoid": SigmoidForCausalLM,
    "gated": GatedForCausalLM,
    "clipped": ClippedForCausalLM,
    "lckv": LCKVForCausalLM,
}
