"""Tiny random models of popular families, to show which families pass the self-check.

This is not a list of supported models: any model that passes the self-check at load works.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

# With the default initializer_range, 0.02, attention is so flat that even leaving out RoPE changes almost nothing.
_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOW: dict[str, Any] = {"sliding_window": 16, "head_dim": 16}
_MIXED: dict[str, Any] = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# The last layer reads the K and V of the first layer of its kind.
_SHARED: dict[str, Any] = {
    **_WINDOW,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_MIXED, **_MOE},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {**_GPT, "rotary_dim": 8},
    "cohere": {},
    "cohere2": _MIXED,
    "deepseek_v3": {"num_key_value_heads": 4},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": _MOE,
    "exaone4": _MIXED,
    "falcon": {},
    "flex_olmo": _MOE,
    "gemma": {"head_dim": 16},
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "gemma3n_text": {**_SHARED, "intermediate_size": [96] * 3, "activation_sparsity_pattern": [0.0] * 3, "laurel_rank": 4},
    "gemma4_text": {**_SHARED, "global_head_dim": 32},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**_MOE, "n_routed_experts": 4},
    "gpt2": _GPT,
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_oss": {**_MIXED, **_MOE},
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite": {},
    "granitemoe": _MOE,
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "jais2": {},
    "lfm2": {},
    "llama": {},
    "llama4_text": {"head_dim": 16, **_MOE},
    "minimax_m2": {**_MOE, "head_dim": 16},
    "ministral": _WINDOW,
    "mistral": _WINDOW,
    "mixtral": {**_WINDOW, **_MOE},
    "mpt": {"n_layers": 2, "n_heads": 4, "d_model": 64},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": _MOE,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": _MOE,
    "qwen2": {},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **_MOE},
    "qwen3_next": _MOE,
    "seed_oss": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {"sliding_window": 16},
    "vaultgemma": _MIXED,
}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a two-layer model of a family, with random float32 weights, on the CPU. `overrides` are values of its config.

    Raises:
        KeyError: the installed transformers does not know the family.
    """
    config = CONFIG_MAPPING[family](**{**_TINY, **FAMILIES.get(family, {}), **overrides})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    finally:
        torch.random.set_rng_state(state)
    return model.float().eval()
