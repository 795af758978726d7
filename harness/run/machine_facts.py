"""Where and how fast a cell was measured, for its record."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

from kvbench import __version__
from kvbench.harness.core.calibration import calibration_ms
from kvbench.harness.core.device import allows_tf32, device_name, instructions


def machine_facts(device: torch.device, seconds: float, task_seconds: float | None, tokens: int | None) -> dict[str, Any]:
    """Facts about the machine and the time that a cell took.

    Args:
        device: that it was measured on.
        seconds: from beginning to end.
        task_seconds: of the task's own work; None if it failed.
        tokens: that it read in this time; None if other cells were measured meanwhile.
    """
    packages = ("torch", "transformers", "numpy")
    tf32 = allows_tf32(device)
    speed = {} if task_seconds is None else {"measured_seconds": round(task_seconds, 3)}
    if task_seconds is not None and tokens is not None:
        speed["tokens_per_second"] = round(tokens / task_seconds, 1)
    return {
        "device": device_name(device),
        "instructions": instructions(device),
        **({} if tf32 is None else {"tf32": tf32}),
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 3),
        "calibration_ms": calibration_ms(device),
        **speed,
        "versions": {"kv-bench": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}},
        "platform": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
