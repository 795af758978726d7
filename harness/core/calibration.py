"""References for times: work of a fixed kind, timed alongside a measurement.

A busy or throttled machine slows the measurement and the reference. The times of two runs can be compared after each is divided
by its reference. A reference of the same kind of work is best, because a busy machine does not slow all work alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvbench.harness.core.device import Marks

MATRIX_SIDE = {"cuda": 2048, "cpu": 256}
BUFFER_BYTES = {"cuda": 2**26, "cpu": 2**22}
_STEPS_PER_ROUND = 5
_ROUNDS_ALONE = 3
_WARM_UP_STEPS = 2
_MAX_ROUND_MS = 100.0  # but at least one step


class Reference:
    """A piece of reference work and its times.

    Attributes:
        rounds: median milliseconds of each round.
    """

    def __init__(self, device: torch.device, work: Callable[[], object]) -> None:
        """Warm up.

        Args:
            work: runs one step of the reference work.
        """
        self.rounds: list[float] = []
        self._device, self._work = device, work
        last_ms = self._timed(_WARM_UP_STEPS)[-1]
        self._steps = max(1, min(_STEPS_PER_ROUND, int(_MAX_ROUND_MS / last_ms)))

    def time_round(self) -> None:
        """Time one round."""
        self.rounds.append(float(np.median(self._timed(self._steps))))

    def _timed(self, steps: int) -> list[float]:
        marks = Marks(self._device)
        marks.mark()
        for _ in range(steps):
            self._work()
            marks.mark()
        return marks.milliseconds()


def calibration_ms(device: torch.device) -> float:
    """Time a calibration step, a float32 product and a copy of fixed sizes. Return its milliseconds. Takes about 10 ms."""
    side = MATRIX_SIDE.get(device.type, MATRIX_SIDE["cpu"])
    factor = torch.ones(side, side, device=device)
    product = torch.empty_like(factor)
    source = torch.ones(BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"]) // 4, device=device)
    target = torch.empty_like(source)

    def step() -> None:
        torch.mm(factor, factor, out=product)
        target.copy_(source)

    reference = Reference(device, step)
    for _ in range(_ROUNDS_ALONE):
        reference.time_round()
    return round(float(np.median(reference.rounds)), 5)
