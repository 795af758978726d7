"""Loading of models: read a model onto a device, adopt it for the decode loop, and check it."""

from __future__ import annotations

import gc
import hashlib
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.harness.core.device import free_bytes, use_full_float32
from kvbench.harness.core.errors import RefusedModelError, UserError, did_you_mean
from kvbench.harness.core.user_cache import file_digest
from kvbench.harness.engine.attention import NAME
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt
from kvbench.harness.models.config import first_cause, read_config
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.layers import device_map, devices_for_layers, dispatch
from kvbench.harness.models.selfcheck import check, has_finite_output
from kvbench.harness.models.weights import read_weights

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "merges.txt",
    "tekken.json",
    "tiktoken.model",
)
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_LEAST_USED = 0.9  # smallest share of a vocabulary that its tokenizer uses
_PADDING = 256  # unused entries that are accepted in a vocabulary of any size
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(name: str | torch.device) -> torch.device:
    """Return the device with this name; "auto" is CUDA if available, else the CPU.

    Raises:
        UserError: the name is invalid, or this machine has no such device.
    """
    name = str(name)  # callers in Python may pass a torch.device
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


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in `DTYPES`, or of "float64", which comparisons use for small rounding errors."""
    return torch.float64 if name == "float64" else DTYPES[name]


def load(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    gguf_file: str | None = None,
    pickle: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in evaluation mode and its tokenizer, for `kvbench.Cache` and transformers.

    Args:
        model: a directory, a GGUF file, a hub id, `builtin:NAME`, or `smollm2`.
        dtype: float32, bfloat16 or float16, as a name or a torch.dtype; weights in a GGUF file are dequantised.
        device: auto, cpu, cuda, cuda:1, or a torch.device.
        revision: commit, branch or tag of a hub model.
        gguf_file: the GGUF file to read of a directory or hub model.
        pickle: accept weights that are not safetensors.

    Raises:
        UserError: the model is not available, has no tokenizer, or its files are damaged.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype '{name}'{did_you_mean(name, DTYPES)}")
    transformers.utils.logging.disable_progress_bar()
    directory = model_directory(str(model), revision, pickle, gguf_file)
    config = read_config(directory)  # first, because it registers the model type of a plug-in
    tokenizer, on = load_tokenizer(directory), device_of(device)
    hf = read_weights(directory, config, DTYPES[name], pickle, attn_implementation=None)
    return hf.eval().to(on), tokenizer  # type: ignore[arg-type]  # transformers' stubs


class LazyTokenizer:
    """A tokenizer that is loaded from a model's directory at the first call.

    Attributes:
        directory: directory of the model's files.
        loaded: the tokenizer; None before the first call.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.loaded: PreTrainedTokenizerBase | None = None

    def __call__(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            UserError: the model has no tokenizer, or the tokenizer can't map tokens to bytes.
        """
        if self.loaded is None:
            self.loaded = load_tokenizer(self.directory)
        return self.loaded


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        UserError: the model has no tokenizer, or the tokenizer can't map tokens to bytes.
    """
    if directory.is_file():
        raise UserError(
            f"random:{directory.stem}: random weights have no tokenizer, which this task needs to read text; "
            "give another model (--model)"
        )
    name = directory.name
    if not any((directory / file).exists() for file in _TOKENIZER_FILES):
        raise UserError(f"{name}: has no tokenizer.json or other tokenizer file, which this task needs to read text")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory,
            trust_remote_code=False,
            mistral_format=False,  # the default depends on whether mistral-common is installed
        )
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise UserError(
            f"{name}: its tokenizer can't be read ({type(error).__name__}: {first_cause(error)}): is tokenizer.json complete?"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(f"{name}: its tokenizer has no tokenizer.json, which is needed to map tokens to bytes")
    if not tokenizer("a word", add_special_tokens=False)["input_ids"]:
        raise UserError(f"{name}: its tokenizer gives no tokens for a word: is tokenizer.json complete?")
    return tokenizer


def tokenizer_digest(directory: Path) -> str:
    """Return the sha256 over the files of a model's tokenizer."""
    files = [directory / name for name in (*_TOKENIZER_FILES, *_TOKENIZER_SETTINGS)]
    return hashlib.sha256("".join(file_digest(file) for file in files if file.exists()).encode()).hexdigest()


def tokenizer_differs(tokenizer: PreTrainedTokenizerBase, directory: Path) -> str | None:
    """Return the disagreement of a tokenizer with its model's config; None if they agree.

    Vocabularies may be padded, for example to a multiple of 128, and some chat models change one special token. Three differences
    count as disagreement: too many entries, far too few entries, or no special token in common.
    """
    config = read_config(directory).get_text_config()
    entries, rows = len(tokenizer), config.vocab_size
    if entries > rows or entries < min(_LEAST_USED * rows, rows - _PADDING):
        return f"its tokenizer has {entries:,} entries, and its config a vocabulary of {rows:,}"
    named = {}
    for name in ("bos_token_id", "eos_token_id"):
        mine, theirs = getattr(tokenizer, name), getattr(config, name, None)
        if mine is not None and theirs is not None:
            named[name] = (mine, theirs)
    if not named or any(mine in (theirs if isinstance(theirs, list) else [theirs]) for mine, theirs in named.values()):
        return None
    return "its tokenizer and its config disagree: " + ", ".join(f"{k} {a} and {b}" for k, (a, b) in named.items())


def load_model(
    directory: Path,
    dtype: str,
    device: torch.device,
    rope_length: int | None = None,
    allow_pickle: bool = False,
    *,
    random: bool = False,
    devices: int = 1,
) -> Model:
    """Load a model, adopt it for the decode loop, and check it against its own forward pass.

    TF32 is turned off, because float32 on a GPU would fail the check.

    Args:
        directory: directory of the model's files; with `random`, the config file.
        device: device of the model, or the first of several devices.
        rope_length: longest position + 1, in tokens, for RoPE types whose tables depend on it.
        random: whether weights are drawn on the device, with equal values at every call.
        devices: number of devices over which the layers are spread.

    Raises:
        UserError: the model is not a causal language model, its files are damaged or don't match its config, its logits are not
            finite, or it can't be driven exactly.
        MemoryError: random weights don't fit.
    """
    use_full_float32(device)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # `read_weights` reports missing tensors, in one line
    name = directory.stem if random else directory.name
    config = read_config(directory)
    hf = _placed(directory, config, torch_dtype(dtype), device, allow_pickle, random, devices).eval()
    model = _adopted(hf, name, dtype, rope_length)
    gc.collect()
    return model


def _placed(
    directory: Path, config: Any, dtype: torch.dtype, device: torch.device, allow_pickle: bool, random: bool, devices: int
) -> PreTrainedModel:
    """Return the model on its devices."""
    if devices > 1:
        places = device_map(config, dtype, devices_for_layers(device, devices), AutoModelForCausalLM)
        if random:
            return dispatch(random_model(config, dtype, torch.device("cpu"), AutoModelForCausalLM), places)
        return read_weights(directory, config, dtype, allow_pickle, device_map=places)
    if random:
        return random_model(config, dtype, device, AutoModelForCausalLM)
    return read_weights(directory, config, dtype, allow_pickle).eval().to(device)  # type: ignore[arg-type]


def _adopted(hf: PreTrainedModel, name: str, dtype: str, rope_length: int | None) -> Model:
    """Adopt and check a model. Non-finite logits are reported even if another check fails first."""
    refused: UnsupportedModelError | None = None
    try:
        model = adopt(hf, rope_length)
        model.check = check(model, rope_length)
    except UnsupportedModelError as error:
        refused = error
    refuse_unless_finite(hf, name, dtype)
    if refused is not None:
        raise RefusedModelError(
            f"{name}: model family '{hf.config.model_type}' can't be driven: {refused}; 'bench list models' shows which can"
        ) from refused
    return model


def refuse_unless_finite(hf: PreTrainedModel, name: str, dtype: str) -> None:
    """Refuse a model whose logits are not finite."""
    if not has_finite_output(hf):
        instead = "use bfloat16 or float32" if dtype == "float16" else "its weights are damaged, or too large for it"
        raise RefusedModelError(f"{name}: its logits are not finite in {dtype}: {instead}")


def random_model(config: Any, dtype: torch.dtype, device: torch.device, model_class: Any) -> PreTrainedModel:
    """Return a model with this config whose weights are drawn by its own initialisation with seed 0.

    Raises:
        MemoryError: the weights don't fit.
    """
    with torch.device("meta"):
        needed = dtype.itemsize * sum(p.numel() for p in model_class.from_config(config).parameters())
    if needed > free_bytes(device):
        raise MemoryError(f"its weights take {needed / 2**30:.1f} GiB, {free_bytes(device) / 2**30:.1f} GiB are free")
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model: PreTrainedModel = model_class.from_config(config, dtype=dtype, attn_implementation=NAME)
    return model
