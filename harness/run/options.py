"""How a suite is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvbench.harness.run.keep_steps import KeepSteps


@dataclass(frozen=True)
class RunOptions:
    """How to run a suite. Numbers depend on it by no more than rounding.

    Attributes:
        device: to run on.
        data: directory of the text; the task's own source when None.
        block: T, tokens that pass a layer at once; chosen by method and free memory when None.
        walk: always read token by token inside the layers.
        fresh: measure finished cells again.
        keep: write keep maps of these steps, and measure finished cells that have none again; no maps when None.
    """

    device: torch.device
    data: Path | None = None
    block: int | None = None
    walk: bool = False
    fresh: bool = False
    keep: KeepSteps | None = None
