"""Recompute-sink-window: no cache; for every token, run the first tokens of the stream and its newest through the model again.

The quality reference for models that always see an opening token, such as a BOS or a learnable sink.

Source: "sliding window with re-computation", Xiao et al. 2023, arXiv:2309.17453, Fig. 1(c).
Differs: the first tokens of the stream stay in the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.policies.sink_window import SinkWindow


@dataclass(frozen=True)
class RecomputeSinkWindow(SinkWindow):
    """Recompute the tokens that sink + window keeps, so that their keys and values depend on no other token."""

    caches: ClassVar[bool] = False

    sinks: int = 1  # tokens
