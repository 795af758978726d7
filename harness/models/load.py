"""Loading a model from its files, on a device, adopted and checked."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.harness.core.device import free_bytes
from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.engine import interface
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt
from kvbench.harness.models.config import first_cause, read_config
from kvbench.harness.models.selfcheck import check, has_finite_logits
from kvbench.harness.models.weights import read_weights

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "merges.txt",
    "tekken.json", "tiktoken.model",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where there is one.

    Raises:
        UserError: it is no name of a device, or there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"--device {name}: expected auto, cpu, cuda, or cuda:1 and so on")
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
    name = directory.name
    if not any((directory / file).exists() for file in _TOKENIZER_FILES):
        raise UserError(f"{name}: no tokenizer.json in it, nor another tokenizer's file, and this task reads text")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise UserError(
            f"{name}: its tokenizer can't be read ({type(error).__name__}: {first_cause(error)}): is tokenizer.json whole?"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(f"{name}: a tokenizer without tokenizer.json, which can't tell the bytes of a token")
    if not tokenizer("a word", add_special_tokens=False)["input_ids"]:
        raise UserError(f"{name}: its tokenizer makes no tokens of a word: is tokenizer.json whole?")
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
        UserError: not a causal language model, files that are damaged or don't fit the config, logits that are not
            finite, or a model that can't be driven exactly.
        MemoryError: random weights that don't fit.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its report of what is missing: `weights` tells that in one line
    name = directory.stem if random else directory.name
    config = read_config(directory)
    kind = DTYPES[dtype]
    hf = _random_model(config, kind, device) if random else read_weights(directory, config, kind, allow_pickle)
    model = _adopted(hf.eval().to(device), name, dtype, rope_length)
    gc.collect()
    return model


def _adopted(hf: PreTrainedModel, name: str, dtype: str, rope_length: int | None) -> Model:
    """The model under the decode loop, checked. What isn't finite is told as that, whatever check stumbles over it first."""
    refused: UnsupportedModelError | None = None
    try:
        model = adopt(hf, rope_length)
        model.check = check(model, rope_length)
    except UnsupportedModelError as error:
        refused = error
    if not has_finite_logits(hf):
        instead = "use bfloat16 or float32" if dtype == "float16" else "its weights are damaged, or too large for it"
        raise RefusedModelError(f"{name}: its logits are not finite in {dtype}: {instead}") from refused
    if refused is not None:
        raise RefusedModelError(
            f"{name}: model family '{hf.config.model_type}' can't be driven: {refused}; 'bench list models' shows which can"
        ) from refused
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
