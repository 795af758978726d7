"""Figures of the attention task, computed from notes of each sample. Imports no torch.

Axis letters: N samples, L layers, Q query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import MIN_BLOCKS, clustered

Arrays = Mapping[str, NDArray[Any]]


def figures(noted: Arrays, epsilon: float) -> dict[str, Any]:
    """Compute the figures of a record.

    Args:
        noted: `first`, `late`, `entropy`, `largest_logit` and optionally `rest`, [N, L, Q] each; and `tokens`, the length of a
            sample.
        epsilon: smallest share of attention that makes the first token a head's sink.
    """
    first = noted["first"]
    shares = (first > epsilon).mean((1, 2))
    result: dict[str, Any] = {
        "samples": len(first),
        "tokens": int(noted["tokens"]),
        "heads": first[0].size,
        "sink_heads": float(shares.mean()),
        "sink_heads_interval": ends(shares),
        "first": float(first.mean()),
        "first_interval": ends(first.mean((1, 2))),
        "first_by_head": first.mean(0).tolist(),
        "entropy": float(noted["entropy"].mean()),
        "entropy_by_head": noted["entropy"].mean(0).tolist(),
        "largest_logit": float(noted["largest_logit"].max()),
        "layers": [_layer(noted, layer) for layer in range(first.shape[1])],
    }
    if "rest" in noted:
        result["rest"] = float(noted["rest"].mean())
    return {name: x for name, x in result.items() if x is not None}


def _layer(noted: Arrays, layer: int) -> dict[str, Any]:
    """Compute the figures of a layer."""
    names = ("first", "late", "entropy", "largest_logit", "rest")
    result: dict[str, Any] = {name: float(noted[name][:, layer].mean()) for name in names if name in noted}
    return result | {"late_deviation": float(noted["late"][:, layer].std())}


def ends(values: NDArray[Any]) -> list[float] | None:
    """Return the 95 % interval of a mean over samples; None with too few samples. values: [N]."""
    if len(values) < MIN_BLOCKS:
        return None
    interval = clustered(values.astype(np.float64), np.ones(len(values)))
    return None if interval.low is None or interval.high is None else [interval.low, interval.high]
