"""Noise bands: how much the latency of a cell varies while nothing changes.

Latency is a ratio to a yardstick that was timed in the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics

# Half-widths of bands are in log ratio.
_HALF_WIDTH_SDS = 4
_MIN_HALF_WIDTH = 0.10  # a machine's speed varies from day to day
_MIN_HALF_WIDTH_DENSE = 0.40  # its yardstick runs other code; a regression must still show at twice the time
_HALF_WIDTH_OF_ONE_RUN = 0.30  # one run has no spread
_DETECTABLE_SLOWDOWN = 0.30


class Band(BaseModel):
    """Range of the ratio of a cell's step time to its yardstick's, while nothing changes.

    Attributes:
        ratio: median over the runs.
        low: lower end.
        high: upper end.
        runs: number of runs it was learnt from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ratio: float = Field(gt=0, allow_inf_nan=False)
    low: float = Field(gt=0, allow_inf_nan=False)
    high: float = Field(gt=0, allow_inf_nan=False)
    runs: int = Field(ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.ratio <= self.high:
            raise ValueError(f"a band of {self.ratio:g} from {self.low:g} to {self.high:g}")
        return self


def learn(runs: Sequence[Sequence[Record]]) -> dict[str, Band]:
    """Bands by cell id, from runs between which nothing changed.

    Args:
        runs: the latency records of each run.
    """
    log_ratios: dict[str, list[float]] = {}
    dense = set()
    for records in runs:
        for record in records:
            value = ratio(record, records)
            if value is not None:
                log_ratios.setdefault(record.cell_id, []).append(math.log(value))
                dense |= {record.cell_id} if is_dense(record) else set()
    return {cell: _band(logs, _MIN_HALF_WIDTH_DENSE if cell in dense else _MIN_HALF_WIDTH) for cell, logs in log_ratios.items()}


def _band(log_ratios: Sequence[float], min_half_width: float) -> Band:
    median = float(np.median(log_ratios))
    spread = _HALF_WIDTH_SDS * float(np.std(log_ratios, ddof=1)) if len(log_ratios) > 1 else _HALF_WIDTH_OF_ONE_RUN
    half_width = max(min_half_width, spread)
    low, middle, high = (round(math.exp(x), 5) for x in (median - half_width, median, median + half_width))
    return Band(ratio=middle, low=low, high=high, runs=len(log_ratios))


def too_noisy(bands: dict[str, Band]) -> list[str]:
    """Ids of cells whose band is so wide that a slowdown of 30 % would pass."""
    return [cell for cell, band in bands.items() if band.high / band.ratio > 1 + _DETECTABLE_SLOWDOWN]


def ratio(record: Record, run: Sequence[Record]) -> float | None:
    """Step time as a ratio to the yardstick's in the same rounds: the median over rounds.

    Dense is compared with the model's own forward pass, every other policy with dense.

    Args:
        record: a latency record.
        run: all records of its run.

    Returns:
        None if the run has no yardstick.
    """
    ours = record.measured(StepMetrics)
    if ours is None:
        return None
    if is_dense(record):
        yardstick_ms = ours.forward_ms
    else:
        others = (m for r in run if is_dense(r) and (m := r.measured(StepMetrics)))
        yardstick_ms = next((m.rounds_ms for m in others if m.together == ours.together), None)
    if not yardstick_ms or len(yardstick_ms) != len(ours.rounds_ms):
        return None
    return float(np.median(np.array(ours.rounds_ms) / np.array(yardstick_ms)))


def is_dense(record: Record) -> bool:
    """Whether its cache keeps everything."""
    return record.cell.is_dense
