"""The model that a recipe begins with: untrained, or with the weights of another."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.own_attention import ZERO_SINK
from kvbench.harness.models.hub import model_directory
from kvbench.lab.pretrain import sigma_reparam
from kvbench.lab.pretrain.config import PretrainConfig
from kvbench.lab.shared_kv.model import LCKVConfig, LCKVForCausalLM
from kvbench.lab.variants import VARIANTS
from kvbench.lab.variants.gpt2 import WeighedGPT2Config, WeighedGPT2ForCausalLM


def new_model(config: PretrainConfig) -> PreTrainedModel:
    """The model before the first step. Weights that two recipes draw are the same, whatever their sinks and attention.

    Raises:
        UserError: the model to go on from is not there, or has other weights.
    """
    torch.manual_seed(config.seed)
    model = _gpt2(config) if config.shape.family == "gpt2" else _llama(config)
    if config.start is not None:
        model = _with_weights(model, config.start)
    if config.sigma_reparam:
        sigma_reparam.reparametrise(model, config.seed)
    return model


def _with_weights(model: PreTrainedModel, start: str) -> Any:
    """The model with those weights, in float32."""
    try:
        directory = model_directory(start, None, allow_pickle=False)
    except UserError as error:
        raise UserError(f"a model to go on from: {error}. --set start=DIR names another") from None
    family: Any = type(model)
    try:
        loaded, loading = family.from_pretrained(directory, config=model.config, dtype=torch.float32, output_loading_info=True)
    except RuntimeError as error:
        raise UserError(f"start: {start} has weights of another shape ({str(error).splitlines()[0]})") from None
    other = sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"])
    if other:
        raise UserError(f"start: {start} has other weights ({other[0]})")
    return loaded


def _llama(config: PretrainConfig) -> PreTrainedModel:
    settings = _settings(config)
    attention: dict[str, Any] = {"attn_implementation": ZERO_SINK if config.zero_sink else "sdpa"}
    attention |= {"zero_sink": True} if config.zero_sink else {}
    llama = LlamaForCausalLM(LlamaConfig(**settings, **attention))
    model = llama if config.attention == "softmax" else _variant(config, settings)
    if model is not llama:
        model.load_state_dict(llama.state_dict(), strict=False)  # what it has besides keeps its own beginning
    return model


def _gpt2(config: PretrainConfig) -> PreTrainedModel:
    """A GPT-2 with ReLU in its MLP and without dropout."""
    shape = config.shape
    settings: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.intermediate,
        "n_positions": config.training.sample + config.sinks,
        "activation_function": "relu",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": config.training.initial,
        "bos_token_id": 0 if config.sinks else None,
        "eos_token_id": None,
        "attn_implementation": ZERO_SINK if config.zero_sink else "sdpa",
    } | ({"zero_sink": True} if config.zero_sink else {})
    if config.attention == "softmax":
        return GPT2LMHeadModel(GPT2Config(**settings))
    return WeighedGPT2ForCausalLM(WeighedGPT2Config(**settings, weighing=config.attention))


def _variant(config: PretrainConfig, settings: dict[str, Any]) -> PreTrainedModel:
    """A model with another attention, of our own or, with RMSNorm of queries and keys before RoPE, transformers' Qwen3."""
    if config.attention == "qk_norm":
        width = settings["hidden_size"] // settings["num_attention_heads"]
        return Qwen3ForCausalLM(Qwen3Config(**settings | {"head_dim": width, "attn_implementation": "sdpa"}))
    if config.lckv is not None:
        return LCKVForCausalLM(LCKVConfig(**settings | config.lckv.model_dump(mode="json")))
    kind: Any = VARIANTS[config.attention]
    model: PreTrainedModel = kind(kind.config_class(**settings))
    return model


def _settings(config: PretrainConfig) -> dict[str, Any]:
    """The model's config, without its attention."""
    shape = config.shape
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": config.training.sample + config.sinks,
        "initializer_range": config.training.initial,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": 0 if config.sinks else None,
        "eos_token_id": None,
    }
