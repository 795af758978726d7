"""How much the latency of a cell varies when nothing has changed: learnt from runs, as a ratio to what was measured in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import StepMetrics

_WIDTHS = 4  # standard deviations of the log ratio that a band has on either side
_NARROWEST = 0.10  # a band is never narrower, in log ratio: machines have days
_NARROWEST_OF_DENSE = 0.40  # nor dense's: its yardstick is another kind of work, and what it is held for is twice as long
_ONE_RUN = 0.30  # the width that is assumed where a single run tells nothing of it
_HIDES = 0.30  # a slowdown that may not hide in a band: told when a baseline is made


class Band(BaseModel):
    """Where the ratio of a cell's step to its yardstick's lies while nothing has changed.

    Attributes:
        ratio: of the medians of the runs, the middle one.
        low: lower end.
        high: upper end.
        runs: that it was learnt from.
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


def learnt(runs: Sequence[Sequence[Record]]) -> dict[str, Band]:
    """Bands by cell id, from runs between which nothing changed.

    Args:
        runs: the latency records of each.
    """
    seen: dict[str, list[float]] = {}
    dense = set()
    for records in runs:
        for record in records:
            found = ratio(record, records)
            if found is not None:
                seen.setdefault(record.cell_id, []).append(math.log(found))
                dense |= {record.cell_id} if is_dense(record) else set()
    return {cell: _band(logs, _NARROWEST_OF_DENSE if cell in dense else _NARROWEST) for cell, logs in seen.items()}


def _band(logs: Sequence[float], narrowest: float) -> Band:
    middle = float(np.median(logs))
    spread = max(narrowest, _WIDTHS * float(np.std(logs, ddof=1)) if len(logs) > 1 else _ONE_RUN)
    low, at, high = (round(math.exp(x), 5) for x in (middle - spread, middle, middle + spread))
    return Band(ratio=at, low=low, high=high, runs=len(logs))


def too_noisy(bands: dict[str, Band]) -> list[str]:
    """Cells, by id, in whose bands a slowdown of 30 % could hide."""
    return [cell for cell, band in bands.items() if band.high / band.ratio > 1 + _HIDES]


def ratio(record: Record, run: Sequence[Record]) -> float | None:
    """How long a step takes beside its yardstick's, measured in turn: the median over the rounds.

    The yardstick of dense is the calibration step, of every other policy dense.

    Args:
        record: of latency.
        run: all records that were measured with it.

    Returns:
        None without such a yardstick.
    """
    ours = record.measured(StepMetrics)
    if ours is None:
        return None
    if is_dense(record):
        beside = ours.calibration_ms
    else:
        others = (m for r in run if is_dense(r) and (m := r.measured(StepMetrics)))
        beside = next((m.rounds_ms for m in others if m.together == ours.together), None)
    if not beside or len(beside) != len(ours.rounds_ms):
        return None
    return float(np.median(np.array(ours.rounds_ms) / np.array(beside)))


def is_dense(record: Record) -> bool:
    """Whether a record is of the cache that keeps everything."""
    return record.cell.policy == "dense"
