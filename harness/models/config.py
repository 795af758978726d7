"""Reading and checking of a model's config.json, so that mistakes are reported before they cause a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import LARGEST_INTEGER, UserError

_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "n_embd",
    "n_layer",
    "n_head",
)


def read_config(directory: Path) -> PreTrainedConfig:
    """Read the config of a model, given its directory or the config file itself.

    Raises:
        UserError: transformers can't read the config; the message has the reason.
    """
    file = directory if directory.is_file() else directory / "config.json"
    name = f"{file.parent.name}/{file.name}"
    value = _json_object(file)
    if (generation := file.with_name("generation_config.json")).exists():
        _json_object(generation)  # transformers would ignore an unreadable generation config
    for part in (value, value.get("text_config")):
        if isinstance(part, dict):
            _check_counts(part, name)
            if file != directory:
                _refuse_quantised(part, name)
            kind = part.get("model_type")
            if isinstance(kind, str) and kind not in CONFIG_MAPPING:
                plugins.load_model_type(kind)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers and huggingface_hub raise many kinds
        raise UserError(f"{name}: transformers can't read it ({first_cause(error)})") from error
    text: Any = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise UserError(f"{name}: the config of its text model is {str(text)[:60]}, expected a JSON object")
    return config


def _json_object(file: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        UserError: the file can't be read, or holds no JSON object.
    """
    name = f"{file.parent.name}/{file.name}"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{name}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{name}: expected a JSON object, not {type(value).__name__}")
    return value


def first_cause(error: BaseException) -> str:
    """Return the first line of the message of an error's first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _refuse_quantised(part: dict[str, Any], name: str) -> None:
    """Refuse quantised weights, because the code that multiplies by them depends on the installed packages."""
    if quantisation := part.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise UserError(
            f"{name}: its weights are quantised (quantization_config, {method}), so results would depend on optional packages: "
            "save the model dequantised (model.dequantize(), then save_pretrained), or give a GGUF file"
        )


def _check_counts(part: dict[str, Any], name: str) -> None:
    """Refuse sizes that are not positive 64-bit integers. Transformers checks lists with a value per layer."""
    for key in _COUNTS:
        value = part.get(key)
        if isinstance(value, (str, bool, float)) or (isinstance(value, int) and not 1 <= value <= LARGEST_INTEGER):
            raise UserError(f"{name}: {key} is {value!r}, expected a whole number from 1 to {LARGEST_INTEGER:,}")
