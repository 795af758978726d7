"""LM-Infinite: the first tokens of the stream and a recent window, a Lambda-shaped attention mask.

Source: Han et al. 2024, arXiv:2308.16137, Section 4: distances are clamped to the training length, which here is the
position mode, an axis of its own: `{name: lambda, positions: clamped}`.
Differs: the mask's window is what the capacity leaves (the paper's is the training length).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.policies.sink_window import SinkWindow


@dataclass(frozen=True)
class Lambda(SinkWindow):
    """Keep the `sinks` first tokens of the stream, ten by default, and the `window` newest."""

    sinks: int = 10  # tokens
