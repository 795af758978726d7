"""Loading a model from its files, on a device, adopted and checked."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from harness.engine import interface
from harness.engine.model import Model, UnsupportedModelError, adopt
from harness.engine.selfcheck import check, free_bytes
from harness.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where there is one.

    Raises:
        UserError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        UserError: there is none, or it can't tell which bytes a token stands for.
    """
    if directory.is_file():
        raise UserError(f"random:{directory.stem}: random weights have no tokenizer, and this task reads text (--model)")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory.name}: no tokenizer that transformers can load ({type(error).__name__})") from error
    if not tokenizer.is_fast:
        raise UserError(f"{directory.name}: a tokenizer without tokenizer.json, which can't tell the bytes of a token")
    return tokenizer


def load_model(
    directory: Path,
    dtype: str,
    device: torch.device,
    rope_length: int | None = None,
    allow_pickle: bool = False,
    *,
    random: bool = False,
) -> Model:
    """The model, adopted by the decode loop and checked against its own forward pass.

    Args:
        directory: of the model's files; with `random`, its config file.
        dtype: of the weights and the cache.
        device: to put it on.
        rope_length: as in `adopt`.
        allow_pickle: accept weights that are not safetensors.
        random: draw the weights on the device instead of reading them, the same at every call.

    Raises:
        UserError: not a causal language model, or one that can't be driven exactly.
        MemoryError: random weights that don't fit.
    """
    transformers.utils.logging.disable_progress_bar()
    name = directory.stem if random else directory.name
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        if random:
            hf = _random_model(config, DTYPES[dtype], device)
        else:
            hf = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=DTYPES[dtype],
                attn_implementation=interface.NAME,
                trust_remote_code=False,
                use_safetensors=None if allow_pickle else True,
            )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{name}: transformers can't load it ({str(error).strip().splitlines()[0]})") from error
    try:
        model = adopt(hf.eval().to(device), rope_length)
        model.check = check(model, rope_length)
    except UnsupportedModelError as error:
        raise UserError(
            f"{name}: model family '{config.model_type}' can't be driven: {error}; 'bench list models' shows which can"
        ) from error
    gc.collect()
    return model


def _random_model(config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of this shape whose weights are drawn from its own initialisation, seed 0."""
    with torch.device("meta"):
        needed = dtype.itemsize * sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if needed > free_bytes(device):
        raise MemoryError(f"its weights take {needed / 2**30:.1f} GiB, {free_bytes(device) / 2**30:.1f} GiB are free")
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=interface.NAME)
    return model
