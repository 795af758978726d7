"""Options and figures of the divergence task, and how the figures follow from what was compared at each position.

Axis letters: N samples, P positions of a sample whose token is predicted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvbench.harness.core.intervals import Interval, interval
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.rules import EXACT, MEAN_NATS, PART_NATS, RUN_NATS, SUM, near
from kvbench.harness.records.types import Amount, Count, Nats, Number, Part, Positive, Share
from kvbench.harness.tasks.common.samples import SampleOptions, buckets

_SHARE = near(2e-3)  # rounding may change the top token where two are about as likely
Ends = Annotated[list[Number], Field(min_length=2, max_length=2)]


class DivergenceOptions(SampleOptions):
    """Options of the divergence task."""

    name: Literal["divergence"] = "divergence"
    samples: int = Field(128, ge=1, le=100_000, description="pieces of the text that are read, one after the other")
    tokens: int = Field(
        256, ge=2, le=2**20, description="length of a sample, the tokens that open it included; at most the training length"
    )


class DivergenceAt(Part):
    """Predictions of tokens between two positions of a sample."""

    from_: Annotated[Count, EXACT] = Field(alias="from", description="first position")
    to: Annotated[Count, EXACT] = Field(description="first position after the bucket")
    kl: Annotated[Amount, near(PART_NATS)] = Field(description="mean KL divergence, nats per token")
    agreement: Annotated[Share, _SHARE] = Field(description="share of tokens with the same top token")


class SampleSums(Part):
    """Sums over each sample, for paired differences between policies."""

    kl: Annotated[list[Amount], near(RUN_NATS, SUM)] = Field(description="nats")
    agreed: Annotated[list[Count], near(2)] = Field(description="predictions with the same top token")


class DivergenceMetrics(Metrics):
    """How far predictions under a policy are from those of dense."""

    samples: Annotated[Positive, EXACT] = Field(description="pieces of text")
    tokens: Annotated[Positive, EXACT] = Field(description="predictions compared, in all samples")
    kl: Annotated[Amount, near(MEAN_NATS)] = Field(description="KL(dense || policy), mean over predictions, nats per token")
    kl_interval: Annotated[Ends | None, near(PART_NATS)] = Field(None, description="its 95 % interval; None if too short")
    agreement: Annotated[Share, _SHARE] = Field(description="share of predictions with the same top token as dense")
    agreement_interval: Annotated[Ends | None, _SHARE] = Field(None, description="its 95 % interval")
    nll: Annotated[Nats, near(MEAN_NATS)] = Field(description="mean under the policy, nats per token")
    nll_change: Annotated[Nats, near(MEAN_NATS)] = Field(
        description="mean under the policy minus that under dense, nats per token"
    )
    nll_change_interval: Annotated[Ends | None, near(PART_NATS)] = Field(None, description="its 95 % interval")
    by_position: Annotated[list[DivergenceAt], EXACT] = Field(description="the same by position in the sample")
    sums: SampleSums = Field(description="sums over each sample")
    kv_bytes: Annotated[Count | None, near()] = Field(None, description="bytes allocated for K and V of one sample")


# What the trace holds of each prediction: KL(dense || policy) in nats, whether the top token is the same, and the NLL of the
# token that comes, in nats, under the policy and under dense.
COMPARED = np.dtype([("kl", "<f4"), ("agrees", "?"), ("nll", "<f4"), ("dense_nll", "<f4")])


def figures(compared: NDArray[np.void], tokens: int) -> dict[str, Any]:
    """The figures of a record, from the predictions of each sample's last P tokens. compared: [N, P] `COMPARED`."""
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
    """The mean of a figure per prediction, with its interval. Samples are runs of one text. sums: over each sample. [N]."""
    return interval(sums.astype(np.float64), np.full(len(sums), float(positions)), positions, 0)


def _ends(mean: Interval, low: float = -np.inf, high: float = np.inf) -> list[float] | None:
    """An interval's ends, clipped to the range of its figure; None if the text is too short for an interval."""
    return None if mean.low is None or mean.high is None else [max(low, mean.low), min(high, mean.high)]
