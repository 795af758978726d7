"""The check that guards every model: our dense path against the model's own forward pass.

No list of names decides which families work; this does, at load, every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.harness.core.device import free_bytes
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.model import Model, UnsupportedModelError, adopt, own_attention
from kvbench.policies.dense import Dense

_TOKENS = 24
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4}  # of the logits' scale
_ROUNDING_16_BITS = 4e-2
_ANGLES = 4 * 2**-24  # a model's own tables are float32: an angle at position p is uncertain by p * 2**-24
_BOUNDED = 8  # what a sliding window or attention chunk is shrunk to for the check, so that it is crossed
_WINDOWS = ("sliding_window", "attention_chunk_size")


def check(model: Model, rope_length: int | None = None) -> float:
    """Largest difference in logits between our dense path and the model's own forward pass, over what is rounding.

    Tokens go through in blocks of 1 and of 12, with every sliding window shrunk to 8 tokens so that it is
    crossed, and the reference is run at position offset 0 and beyond every length in the config: RoPE is
    relative, so its logits must not move. In float32 where a copy fits into memory, else in the model's own type.
    Rounding is 1e-4 of the largest logit (4e-2 in 16 bits), and more at an offset, where the model's own float32
    angles lose digits.

    Args:
        model: adopted.
        rope_length: as in `adopt`.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    hf = model.hf
    if model.dtype not in (torch.float32, torch.float64) and _float32_fits(hf):
        model = adopt(deepcopy(hf).float(), rope_length)
    with torch.inference_mode():
        worst = _difference(model, rope_length)
        with _shrunk_windows(model.hf) as windows:
            if windows:
                worst = max(worst, _difference(adopt(model.hf, rope_length), rope_length))
    if not worst <= 1:
        raise UnsupportedModelError(f"our logits differ from its own forward pass by {worst:.1g} times what is rounding")
    return worst


def has_finite_logits(hf: PreTrainedModel) -> bool:
    """Whether the model's own forward pass, in its own type, gives numbers; True where it can't be run at all."""
    vocabulary = hf.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0)).to(hf.device)
    try:
        with torch.inference_mode(), own_attention(hf):
            logits: Tensor = hf(input_ids=tokens, use_cache=False).logits
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):  # of a family that `adopt` refuses
        return True
    return bool(logits.isfinite().all())


def _difference(model: Model, rope_length: int | None) -> float:
    """The largest over both block sizes and all offsets, in units of rounding."""
    vocabulary = model.hf.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    ours = []
    for size in (1, 12):
        read = decoder(model, CacheConfig(Dense()))
        ours.append(torch.cat([read(block) for block in tokens.split(size, 1)], 1))
    worst = 0.0
    for offset in _offsets(model.hf, rope_length):
        with own_attention(model.hf):
            at = torch.arange(offset, offset + _TOKENS, device=model.device)[None]
            reference: Tensor = model.hf(input_ids=tokens, position_ids=at, use_cache=False).logits
        rounding = (_ROUNDING.get(model.dtype, _ROUNDING_16_BITS) + _ANGLES * offset) * reference.abs().amax().clamp(min=1)
        worst = max(worst, *(float(((x - reference).abs().amax() / rounding).nan_to_num(torch.inf)) for x in ours))
    return worst


def _offsets(hf: PreTrainedModel, rope_length: int | None) -> list[int]:
    """Where the reference is run: at 0 and past every length that the config mentions."""
    if rope_length is not None:
        return [rope_length - _TOKENS]
    config = hf.config.get_text_config()
    lengths = {getattr(config, name, None) for name in ("max_position_embeddings", *_WINDOWS)}
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [rope, *(x for x in rope.values() if isinstance(x, dict))]
    lengths |= {x.get("original_max_position_embeddings") for x in nested}
    # Far positions cost float32 its angles (the model's own tables, not ours), so offsets stop at 16384.
    return [0, *sorted({min(x, 16384) for x in lengths if isinstance(x, int) and x > 0})]


@contextmanager
def _shrunk_windows(hf: PreTrainedModel) -> Iterator[list[str]]:
    """Every sliding window or attention chunk of the model set to a few tokens, for as long as this lasts."""
    config = hf.config.get_text_config()
    holders: list[Any] = [config, *hf.modules()]
    found = [(x, name, getattr(x, name)) for x in holders for name in _WINDOWS if isinstance(getattr(x, name, None), int)]
    for holder, name, _ in found:
        setattr(holder, name, _BOUNDED)
    try:
        yield sorted({name for _, name, _ in found})
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)


def _float32_fits(hf: PreTrainedModel) -> bool:
    """Whether a float32 copy of the weights fits beside the model, with room to work."""
    needed = 1.2 * 4 * sum(p.numel() for p in hf.parameters())
    return needed < free_bytes(hf.device)
