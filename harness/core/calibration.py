"""A reference for a machine's speed: a matrix product and a copy of fixed sizes, timed alongside a measurement.

A busy or throttled machine slows both. So the times of two runs can be compared once each is divided by its reference.
"""

from __future__ import annotations

import numpy as np
import torch

from kvbench.harness.core.device import Marks

MATRIX_SIDE = {"cuda": 2048, "cpu": 256}
BUFFER_BYTES = {"cuda": 2**26, "cpu": 2**22}
_STEPS_PER_ROUND = 5
_ROUNDS_ALONE = 3
_WARM_UP_STEPS = 2


class Calibration:
    """The calibration step and its times.

    Attributes:
        rounds: median milliseconds of each round.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the float32 matrices and buffers on a device, and warm up."""
        side = MATRIX_SIDE.get(device.type, MATRIX_SIDE["cpu"])
        self.rounds: list[float] = []
        self._device = device
        self._factor = torch.ones(side, side, device=device)
        self._product = torch.empty_like(self._factor)
        self._source = torch.ones(BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"]) // 4, device=device)
        self._target = torch.empty_like(self._source)
        for _ in range(_WARM_UP_STEPS):
            self._step()

    def time_round(self) -> None:
        """Time one round."""
        marks = Marks(self._device)
        marks.mark()
        for _ in range(_STEPS_PER_ROUND):
            self._step()
            marks.mark()
        self.rounds.append(float(np.median(marks.milliseconds())))

    def _step(self) -> None:
        torch.mm(self._factor, self._factor, out=self._product)
        self._target.copy_(self._source)


def calibration_ms(device: torch.device) -> float:
    """Milliseconds of one calibration step now. This takes about ten milliseconds."""
    calibration = Calibration(device)
    for _ in range(_ROUNDS_ALONE):
        calibration.time_round()
    return round(float(np.median(calibration.rounds)), 5)
