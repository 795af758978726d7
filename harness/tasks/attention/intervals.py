"""Intervals of means over samples. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import MIN_BLOCKS, clustered


def ends(values: NDArray[Any]) -> list[float] | None:
    """95 % interval of a mean over samples; None with too few of them. values: [N]."""
    if len(values) < MIN_BLOCKS:
        return None
    interval = clustered(values.astype(np.float64), np.ones(len(values)))
    return None if interval.low is None or interval.high is None else [interval.low, interval.high]
