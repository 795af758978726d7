"""Reading of a model's weights. Incomplete files are refused, because transformers would draw missing tensors at random."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.attention import NAME
from kvbench.harness.models.config import first_cause

_POOLER = re.compile(r"(^|\.)pooler\.")  # a layer on the last hidden states, whose output is never used
_OBSOLETE_BUFFERS = re.compile(r"(^|\.)(inv_freq|position_ids|masked_bias|attention\.bias|attn\.bias)$")  # now computed at load
_MAX_NAMED_TENSORS = 3


def read_weights(
    directory: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    allow_pickle: bool,
    model_class: Any = AutoModelForCausalLM,
    attn_implementation: str | None = NAME,
    *,
    head: bool = True,
    **placed: Any,
) -> PreTrainedModel:
    """Read a model with all its weights.

    Args:
        head: whether the files must have exactly the head of `model_class`. If False, tensors of heads may be missing or
            unexpected, and the model is then returned without a head.
        placed: options of `from_pretrained` that place the model's parts on devices; without options, the CPU.

    Raises:
        UserError: a file is damaged, or its tensors don't match the config.
        MemoryError: the weights don't fit.
    """
    try:
        loaded: Any = model_class.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=False,
            use_safetensors=None if allow_pickle else True,
            ignore_mismatched_sizes=True,  # `_misfits` returns their names
            output_loading_info=True,
            **placed,
        )
    except MemoryError:
        raise
    except Exception as error:  # transformers raises many kinds
        if "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        _refuse_damaged(directory)
        raise UserError(f"{directory.name}: transformers can't load it ({first_cause(error)})") from error
    model: PreTrainedModel = loaded[0]
    misfits = _misfits(model, loaded[1] if isinstance(loaded[1], Mapping) else vars(loaded[1]))
    of_body = {fault: [key for key in keys if not _of_head(key, model)] for fault, keys in misfits.items()}
    refused = misfits if head else of_body
    if any(refused.values()):
        messages = [f"{len(keys)} {fault} ({_some(keys)})" for fault, keys in refused.items() if keys]
        hint = "" if any(of_body.values()) else "; the task attention can do without a head"
        raise UserError(f"{directory.name}: its weight files do not match its config.json; tensors: {'; '.join(messages)}{hint}")
    return model if not any(misfits.values()) else model.base_model  # type: ignore[return-value]  # transformers' stubs


def _refuse_damaged(directory: Path) -> None:
    """Refuse safetensors files that are damaged or incomplete."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{directory.name}: {file.name} is damaged or cut short ({first_cause(error)})") from error


def _misfits(model: PreTrainedModel, info: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tensors in which files don't match the config, by fault. Missing tensors were drawn at random.

    Args:
        info: transformers' loading info: names of missing and unexpected keys, and (name, shape, shape) of mismatched keys.
    """
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    drawn = set(info["missing_keys"]) - mismatched
    read = {tensor.data_ptr() for key, tensor in tensors.items() if key not in drawn}
    missing = [key for key in drawn if key not in tensors or tensors[key].data_ptr() not in read]  # tied tensors were read
    return {
        "missing": [key for key in missing if not _POOLER.search(key)],
        "of another shape": [*mismatched],
        "unexpected": [key for key in info["unexpected_keys"] if not (_OBSOLETE_BUFFERS.search(key) or _POOLER.search(key))],
    }


def _of_head(key: str, model: PreTrainedModel) -> bool:
    """Whether a tensor belongs to a head. Files of models without a head lack the prefix of the base model."""
    first = key.partition(".")[0]
    return first != model.base_model_prefix and not hasattr(model.base_model, first)


def _some(keys: Iterable[str]) -> str:
    """Return the first few names as text, in the order of the layers."""
    ordered = sorted(keys, key=lambda key: ([int(part) if part.isdigit() else -1 for part in key.split(".")], key))
    return ", ".join(ordered[:_MAX_NAMED_TENSORS]) + (", ..." if len(ordered) > _MAX_NAMED_TENSORS else "")
