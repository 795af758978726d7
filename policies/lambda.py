"""LM-Infinite: keep the first tokens of the stream and a recent window (a Lambda-shaped attention mask).

Source: Han et al. 2024, arXiv:2308.16137, Section 4. The paper also clamps distances to the training length. Here that is a
separate setting, the position mode: `{name: lambda, positions: clamped}`.
Differs: the window fills the remaining capacity (in the paper it is the training length).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.policies.sink_window import SinkWindow


@dataclass(frozen=True)
class Lambda(SinkWindow):
    """Keep the first `sinks` tokens of the stream (10 by default) and the `window` newest."""

    sinks: int = 10  # tokens
