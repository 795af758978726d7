"""Self-check of every loaded model: comparison of our dense path with the model's own forward pass.

The self-check decides which model families work; there is no list of names.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.harness.core.device import free_bytes
from kvbench.harness.engine.comparison import relative_difference
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt, private_copy, random_tokens
from kvbench.harness.engine.own_attention import own_attention
from kvbench.policies.dense import Dense

_TOKENS = 24
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4}  # relative to the largest logit
_ROUNDING_16_BITS = 4e-2
_ROUNDING_PER_POSITION = 4 * 2**-24  # models have float32 tables: an angle at position p is uncertain by p * 2**-24
_SHRUNK_WINDOW = 8  # tokens; smaller than the number of tokens of the check
_WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size")


def check(model: Model, rope_length: int | None = None) -> float:
    """Return the largest difference in logits between our dense path and the model's own forward pass, in rounding errors.

    Our path reads blocks of 1 and of 12 tokens, once with the model's own sliding windows and once with windows of 8 tokens. The
    reference runs at position offset 0 and, unless positions are learned, at every length in the config. RoPE is relative, so the
    logits must not change with the offset. Both paths run in float32 if a copy fits into memory, else in the model's own dtype.
    The rounding error is 1e-4 of the largest logit (4e-2 in 16 bits). It grows with the offset, because the model's own float32
    angles lose digits.

    Args:
        rope_length: longest position + 1, in tokens, for RoPE types whose tables depend on it.

    Raises:
        UnsupportedModelError: the logits differ by more than the rounding error.
    """
    hf = model.hf
    if model.dtype not in (torch.float32, torch.float64) and _float32_fits(hf):
        model = adopt(deepcopy(hf).float(), rope_length)
    with torch.inference_mode():
        max_error = _difference(model, rope_length)
        if _windows(model.hf):
            max_error = max(max_error, _difference(adopt(_with_shrunk_windows(model.hf), rope_length, shared=True), rope_length))
    if not max_error <= 1:
        raise UnsupportedModelError(f"our logits differ from its own forward pass by {max_error:.1g} times the rounding error")
    return max_error


def has_finite_output(hf: PreTrainedModel) -> bool:
    """Whether the model's own forward pass gives finite logits, or finite hidden states if the model has no head.

    The pass runs in the model's own dtype. The result is True if the pass can't run at all.
    """
    try:
        with torch.inference_mode(), own_attention(hf):
            output: Tensor = hf(input_ids=random_tokens(hf, 1, _TOKENS), use_cache=False)[0]
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):  # a family that `adopt` refuses
        return True
    return bool(output.isfinite().all())


def _difference(model: Model, rope_length: int | None) -> float:
    """Return the largest difference over both block sizes and all offsets, in rounding errors."""
    tokens, ours = random_tokens(model.hf, 1, _TOKENS), []
    for size in (1, 12):
        read = decoder(model, CacheConfig(Dense()))
        ours.append(torch.cat([read(block) for block in tokens.split(size, 1)], 1))
    max_error = 0.0
    for offset in [0] if model.learned_positions else _offsets(model.hf, rope_length):
        with own_attention(model.hf):
            positions = torch.arange(offset, offset + _TOKENS, device=model.device)[None]
            reference: Tensor = model.hf(input_ids=tokens, position_ids=positions, use_cache=False).logits
        relative = _ROUNDING.get(model.dtype, _ROUNDING_16_BITS) + _ROUNDING_PER_POSITION * offset
        max_error = max(max_error, *(relative_difference(x, reference) / relative for x in ours))
    return max_error


def _offsets(hf: PreTrainedModel, rope_length: int | None) -> list[int]:
    """Return the position offsets of the reference: 0 and every length in the config."""
    if rope_length is not None:
        return [rope_length - _TOKENS]
    config = hf.config.get_text_config()
    lengths = {getattr(config, name, None) for name in ("max_position_embeddings", *_WINDOW_SETTINGS)}
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [rope, *(x for x in rope.values() if isinstance(x, dict))]
    lengths |= {x.get("original_max_position_embeddings") for x in nested}
    # The model's float32 angles are too inexact at far positions, so offsets stop at 16384.
    return [0, *sorted({min(x, 16384) for x in lengths if isinstance(x, int) and x > 0})]


def _windows(hf: PreTrainedModel) -> list[tuple[Any, str]]:
    """Return (holder, name) of every sliding window or attention chunk set in the config or in a module."""
    holders: list[Any] = [hf.config.get_text_config(), *hf.modules()]
    return [(holder, name) for holder in holders for name in _WINDOW_SETTINGS if isinstance(getattr(holder, name, None), int)]


def _with_shrunk_windows(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model that shares its weights and has small sliding windows and attention chunks."""
    copied = private_copy(hf)
    for holder, name in _windows(copied):
        setattr(holder, name, _SHRUNK_WINDOW)
    return copied


def _float32_fits(hf: PreTrainedModel) -> bool:
    """Whether a float32 copy of the weights fits into free memory, with a margin of 20 %."""
    needed: dict[torch.device, float] = {}
    for parameter in hf.parameters():
        needed[parameter.device] = needed.get(parameter.device, 0) + 1.2 * 4 * parameter.numel()
    return all(size < free_bytes(device) for device, size in needed.items())
