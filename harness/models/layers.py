"""Placement of a model's layers on several devices, with Accelerate's device map."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench.harness.core.errors import UserError

_LIMIT_STEP = 1.02  # factor by which a device's share grows until the whole model fits

DeviceMap = dict[str, torch.device]  # device of each module, by name


def devices_for_layers(first: torch.device, count: int) -> list[torch.device]:
    """Return the devices for the layers of a model: `count` CUDA devices from `first` on.

    Raises:
        UserError: the machine has fewer CUDA devices.
    """
    if first.type != "cuda":
        raise UserError(f"model.devices: {count}, parallel: layers needs {count} CUDA devices, and --device {first} is one")
    start, present = first.index or 0, torch.cuda.device_count()
    if start + count > present:
        raise UserError(f"model.devices: {count}, but this machine has {present} CUDA devices, {first} the first used")
    return [torch.device("cuda", start + offset) for offset in range(count)]


def device_map(config: PreTrainedConfig, dtype: torch.dtype, devices: Sequence[torch.device], model_class: Any) -> DeviceMap:
    """Map each module to a device: whole layers in order, with about as many bytes on each device.

    Raises:
        UserError: the model has fewer layers than there are devices.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes

    with torch.device("meta"):
        model: PreTrainedModel = model_class.from_config(config, dtype=dtype)
    model.tie_weights()
    whole = sorted(getattr(model, "_no_split_modules", None) or ())
    total = compute_module_sizes(model, dtype=dtype)[""]
    limit = total / len(devices)
    logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)  # warns of devices that this machine lacks
    while limit <= total:
        places = infer_auto_device_map(
            model, max_memory=dict.fromkeys(range(len(devices)), int(limit)), no_split_module_classes=whole, dtype=dtype
        )
        if set(places.values()) == set(range(len(devices))):
            of_module = {name: devices[int(place)] for name, place in places.items()}
            idle = [name for name in places if not any(True for _ in model.get_submodule(name).parameters())]
            return of_module | dict.fromkeys(idle, devices[0])  # such as RoPE, which every layer waits for
        limit *= _LIMIT_STEP
    raise UserError(f"model.devices: {len(devices)}, but its layers can't be placed on so many")


def dispatch(hf: PreTrainedModel, places: DeviceMap) -> PreTrainedModel:
    """Move every module to its device, and hook every layer so that its inputs are moved, too."""
    from accelerate import dispatch_model

    moved: PreTrainedModel = dispatch_model(hf, dict(places), force_hooks=True)
    return moved
