"""Recompute-sink-window: no cache; every token is predicted from the first tokens of the stream and its newest, run afresh.

The yardstick of models that are never without what opens their text: a learnable sink token, a BOS. After "sliding window with
re-computation", Xiao et al. 2023, arXiv:2309.17453, Fig. 1(c), which drops it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.policies.sink_window import SinkWindow


@dataclass(frozen=True)
class RecomputeSinkWindow(SinkWindow):
    """What sink + window keeps, with keys and values that have seen nothing else."""

    caches: ClassVar[bool] = False

    sinks: int = 1  # tokens
