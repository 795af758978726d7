"""Loads models that are only watched: vision transformers, encoders, and others that the decode loop can't drive."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.model import Model
from kvbench.harness.models.config import read_config
from kvbench.harness.models.load import load_model, random_model, refuse_unless_finite, torch_dtype
from kvbench.harness.models.weights import read_weights
from kvbench.lab.attention.vision import read_vision_weights, saved_class, vision_config


def load_watched(
    directory: Path,
    dtype: str,
    device: torch.device,
    rope_length: int | None = None,
    allow_pickle: bool = False,
    *,
    random: bool = False,
    devices: int = 1,
) -> Model:
    """Load a model as `load_model` does or, if that can't, so that it can be watched; it has no layers then.

    Raises:
        UserError: its files are damaged or don't match its config, or its outputs are not finite.
        MemoryError: random weights don't fit.
    """
    config, kind = read_config(directory), torch_dtype(dtype)
    tower, saved = vision_config(config), saved_class(config)
    if tower is not None:
        vision = (
            random_model(tower, kind, device, AutoModel) if random else read_vision_weights(directory, config, kind, allow_pickle)
        )
        return Model(vision.eval().to(device).requires_grad_(False))  # type: ignore[arg-type]
    if saved is AutoModelForCausalLM or saved.can_generate():
        with suppress(UserError):  # if its files are damaged, reading them again says so
            return load_model(directory, dtype, device, rope_length, allow_pickle, random=random, devices=devices)
    if random:
        hf = random_model(config, kind, device, AutoModelForCausalLM)
    else:
        hf = read_weights(directory, config, kind, allow_pickle, saved, head=False)
    hf = hf.eval().to(device)  # type: ignore[arg-type]
    refuse_unless_finite(hf, directory.stem if random else directory.name, dtype)
    return Model(hf.requires_grad_(False))
