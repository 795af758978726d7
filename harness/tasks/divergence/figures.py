"""Figures of the divergence task, from what was compared at each position. Imports no torch.

Axis letters: N samples, P positions of a sample whose token is predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import Interval, interval
from kvbench.harness.tasks.common.samples import buckets

# What the trace holds of each prediction: KL(dense || policy) in nats, whether the top token is the same, and the NLL of the
# token that comes, in nats, under the policy and under dense.
COMPARED = np.dtype([("kl", "<f4"), ("agrees", "?"), ("nll", "<f4"), ("dense_nll", "<f4")])


def figures(compared: NDArray[np.void], tokens: int) -> dict[str, Any]:
    """The figures of a record.

    Args:
        compared: predictions of each sample's last P tokens. [N, P] `COMPARED`.
        tokens: length of a sample.
    """
    kl, agrees = compared["kl"].astype(np.float64), compared["agrees"]
    nll = compared["nll"].astype(np.float64)
    change = nll - compared["dense_nll"]
    result: dict[str, Any] = {
        "samples": len(kl), "tokens": kl.size, "kl": float(kl.mean()), "agreement": float(agrees.mean()),
        "nll": float(nll.mean()), "nll_change": float(change.mean()),
        "kl_interval": _ends(per_token(kl.sum(1), kl.shape[1]), low=0.0),
        "agreement_interval": _ends(per_token(agrees.sum(1), kl.shape[1]), low=0.0, high=1.0),
        "nll_change_interval": _ends(per_token(change.sum(1), kl.shape[1])),
        "sums": {"kl": [round(x, 5) for x in kl.sum(1).tolist()], "agreed": agrees.sum(1).tolist()},
    }  # fmt: skip
    first = tokens - kl.shape[1]  # position of the first token that is predicted
    parts = [(start, stop, slice(max(start - first, 0), max(stop - first, 0))) for start, stop in buckets(tokens)]
    result["by_position"] = [
        {"from": start, "to": stop, "kl": float(kl[:, part].mean()), "agreement": float(agrees[:, part].mean())}
        for start, stop, part in parts
        if kl[:, part].size
    ]
    return {name: x for name, x in result.items() if x is not None}


def per_token(sums: NDArray[np.floating[Any]] | NDArray[np.integer[Any]], positions: int) -> Interval:
    """The mean of a figure per prediction, with its interval. Samples are runs of one text.

    Args:
        sums: over each sample. [N].
        positions: P.
    """
    return interval(sums.astype(np.float64), np.full(len(sums), float(positions)), positions, 0)


def _ends(mean: Interval, low: float = -np.inf, high: float = np.inf) -> list[float] | None:
    """The ends of an interval, within the range of what it is about; None if the text is too short for one."""
    return None if mean.low is None or mean.high is None else [max(low, mean.low), min(high, mean.high)]
