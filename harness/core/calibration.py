"""A yardstick for a machine's speed: one product of matrices and one copy, of fixed sizes, timed beside what is measured.

Times of two runs can be compared once each is divided by it: a busy or throttled machine slows both.
"""

from __future__ import annotations

import numpy as np
import torch

from kvbench.harness.core.device import Marks

SIDE = {"cuda": 2048, "cpu": 256}  # of the float32 matrices that are multiplied
BYTES = {"cuda": 2**26, "cpu": 2**22}  # of the buffer that is copied
_STEPS = 5  # of a round
_ROUNDS = 3  # where it is measured alone
_WARM_UP = 2


class Calibration:
    """The calibration step, and its time in every round.

    Attributes:
        rounds: milliseconds, the median of each round.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the matrices and the buffers on a device, and warm up."""
        side = SIDE.get(device.type, SIDE["cpu"])
        self.rounds: list[float] = []
        self._device = device
        self._factor = torch.ones(side, side, device=device)
        self._product = torch.empty_like(self._factor)
        self._source = torch.ones(BYTES.get(device.type, BYTES["cpu"]) // 4, device=device)
        self._target = torch.empty_like(self._source)
        for _ in range(_WARM_UP):
            self._step()

    def turn(self) -> None:
        """Time one round."""
        marks = Marks(self._device)
        marks.mark()
        for _ in range(_STEPS):
            self._step()
            marks.mark()
        self.rounds.append(float(np.median(marks.milliseconds())))

    def _step(self) -> None:
        torch.mm(self._factor, self._factor, out=self._product)
        self._target.copy_(self._source)


def calibration_ms(device: torch.device) -> float:
    """Milliseconds of one calibration step now, measured in some ten milliseconds."""
    calibration = Calibration(device)
    for _ in range(_ROUNDS):
        calibration.turn()
    return round(float(np.median(calibration.rounds)), 5)
