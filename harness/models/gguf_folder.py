"""Conversion of a GGUF file to a model folder in the user's cache, with float32 weights, config and tokenizer."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.user_cache import file_digest, private_folder
from kvbench.harness.models.config import first_cause
from kvbench.harness.models.gguf_header import MARKER, GGUFHeader

_log = logging.getLogger("kv-bench")
_FORMAT = 1  # version of the folder; raised when a conversion gives other weights, another config or another tokenizer
_FLOATS = ("F32", "F16", "BF16", "F64")  # types whose values float32 holds, exactly or nearly
# Values of tokenizer.ggml.pre, as llama.cpp's `llm_tokenizer_bpe` defines them. For all other values, transformers splits text as
# GPT-2 does, unless it has a converter for the value.
_SPLIT_LIKE_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "trillion", "granite-docling"}
_SPLIT_DIGITS_FIRST = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def gguf_folder(file: Path) -> Path:
    """Return the model folder of a converted GGUF file. The first call converts the file.

    Raises:
        UserError: the package gguf is not installed, the file is damaged, or transformers can't convert its architecture.
    """
    sha256 = file_digest(file)
    parent = private_folder("gguf") / f"{sha256}-{_FORMAT}-{transformers.__version__}"
    if not (parent / MARKER).exists():
        header = GGUFHeader.read(file)
        _refuse_unreadable(header, file)
        _log.warning("bench: %s: converting it, once, to a model folder in %s", file.name, parent.parent)
        with tempfile.TemporaryDirectory(prefix="new-", dir=parent.parent) as temporary:
            new_folder = Path(temporary) / parent.name
            _convert(file, header, new_folder / file.stem)
            marker = {"file": file.name, "sha256": sha256, "quantised": _quantisation(header)}
            (new_folder / MARKER).write_text(json.dumps(marker))
            if not parent.exists():  # another process may have been faster
                new_folder.rename(parent)
    return next(path for path in parent.iterdir() if path.is_dir())


def _refuse_unreadable(header: GGUFHeader, file: Path) -> None:
    """Refuse files that transformers would read incompletely or not at all."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError:
        raise UserError(f"{file.name}: the package gguf, which reads it, is not installed: run `pip install gguf`") from None
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    parts = metadata.get("split.count", 1)
    if parts > 1:
        raise UserError(f"{file.name}: is one of {parts} parts: merge them first (llama-gguf-split --merge)")
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"{file.name}: transformers {transformers.__version__} can't convert the architecture '{architecture}'; "
            f"it converts {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}"
        )
    size, types = file.stat().st_size, {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    for tensor in header.tensors:
        if tensor.type not in types:
            raise UserError(f"{file.name}: the installed gguf does not know the type {tensor.type} of {tensor.name}")
        elements, block_bytes = types[tensor.type]
        if header.data_start + tensor.offset + tensor.elements // elements * block_bytes > size:
            raise UserError(f"{file.name}: is damaged or cut short: {tensor.name} ends beyond the end of the file")


def _quantisation(header: GGUFHeader) -> str | None:
    """Return the quantisation of a file, such as Q4_1; None if its weights are floats."""
    from gguf import GGMLQuantizationType, LlamaFileType

    elements: dict[str, int] = {}
    for tensor in header.tensors:
        name = GGMLQuantizationType(tensor.type).name
        elements[name] = elements.get(name, 0) + tensor.elements
    if set(elements) <= set(_FLOATS):
        return None
    try:
        declared = LlamaFileType(header.metadata.get("general.file_type", -1)).name.removeprefix("MOSTLY_")
    except ValueError:
        declared = ""
    most = max(elements, key=lambda name: elements[name])
    return declared if declared not in ("", "GUESSED", "ALL_F32", *_FLOATS) else most


def _convert(file: Path, header: GGUFHeader, folder: Path) -> None:
    """Write the model folder.

    Raises:
        UserError: the file can't be converted.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
        model = _dequantised(file)
    except MemoryError:
        raise
    except Exception as error:  # transformers and gguf raise many kinds
        raise UserError(f"{file.name}: transformers can't convert it ({first_cause(error)})") from error
    _refuse_incomplete(model, header, file)
    _split_as_trained(tokenizer, header, file)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # safetensors raises its own kind for a full disk
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{file.name}: the converted model can't be written to {folder.parents[1]} ({error})") from error


def _dequantised(file: Path) -> PreTrainedModel:
    """Read a model with weights in float32 and without traces of the quantisation."""
    kept_packed = getattr(transformers, "GgufConfig", None)  # versions with this class compute on packed weights by default
    options = {} if kept_packed is None else {"quantization_config": kept_packed(dequantize=True)}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that can't be turned off
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32", **options)
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    return model


def _refuse_incomplete(model: PreTrainedModel, header: GGUFHeader, file: Path) -> None:
    """Refuse a conversion that leaves out tensors or settings, or that draws tensors at random."""
    config = model.config.get_text_config()
    tied = config.tie_word_embeddings
    elements = sum(t.elements for t in header.tensors if not (tied and t.name == "output.weight"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if elements != parameters:
        extra = [t.name for t in header.tensors if t.name.startswith("rope")]
        raise UserError(
            f"{file.name}: its tensors have {elements:,} elements, the converted model {parameters:,}: transformers "
            f"{transformers.__version__} leaves some out{f' ({extra[0]})' if extra else ''}"
        )
    architecture = header.metadata["general.architecture"]
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" and (config.rope_parameters or {}).get("rope_type", "default") == "default":
        raise UserError(f"{file.name}: transformers {transformers.__version__} leaves out its RoPE scaling, '{scaling}'")
    window = header.metadata.get(f"{architecture}.attention.sliding_window")
    if window and window != getattr(config, "sliding_window", None):
        raise UserError(f"{file.name}: transformers {transformers.__version__} leaves out its sliding window, {window} tokens")


def _split_as_trained(tokenizer: PreTrainedTokenizerFast, header: GGUFHeader, file: Path) -> None:
    """Give a byte-level BPE the pre-tokenizer with which its merges were learned, if transformers does not.

    Raises:
        UserError: the pre-tokenizer is unknown.
    """
    backend, name = tokenizer.backend_tokenizer, header.metadata.get("tokenizer.ggml.pre", "gpt-2")
    like_gpt2 = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or not like_gpt2 or name in _SPLIT_LIKE_GPT2:
        return
    if name not in _SPLIT_DIGITS_FIRST:
        raise UserError(f"{file.name}: transformers {transformers.__version__} can't convert its pre-tokenizer '{name}'")
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
