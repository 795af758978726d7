"""Loading a model from its files, on a device, adopted and checked."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from harness.engine import interface
from harness.engine.model import Model, UnsupportedModelError, adopt
from harness.engine.selfcheck import check
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
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory.name}: no tokenizer that transformers can load ({type(error).__name__})") from error
    if not tokenizer.is_fast:
        raise UserError(f"{directory.name}: a tokenizer without tokenizer.json, which can't tell the bytes of a token")
    return tokenizer


def load_model(
    directory: Path, dtype: str, device: torch.device, rope_length: int | None = None, allow_pickle: bool = False
) -> Model:
    """The model, adopted by the decode loop and checked against its own forward pass.

    Raises:
        UserError: not a causal language model, or one that can't be driven exactly.
    """
    transformers.utils.logging.disable_progress_bar()
    name = directory.name
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
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
