"""Options and figures of the attention task, and their computation from notes of each sample. Imports no torch.

Axis letters: N samples, L layers, Q query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvbench.harness.core.intervals import MIN_BLOCKS, clustered
from kvbench.harness.records.figure_rules import EXACT, PART_NATS, SUM, near
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.types import Amount, Ends, Number, Part, Positive, Share
from kvbench.harness.tasks.common.samples import SampleOptions

SHARE = near(PART_NATS)


class AttentionOptions(SampleOptions):
    """Options of the attention task."""

    name: Literal["attention"] = "attention"
    epsilon: float = Field(0.3, gt=0, lt=1, description="attention that makes a token a head's sink")
    map_tokens: int = Field(16, ge=2, le=256, description="first tokens of a sample whose mean logits are kept as a map")


class LayerAttention(Part):
    """Figures of a layer: means over samples, and over heads unless a field says otherwise."""

    first: Annotated[Share, SHARE] = Field(description="attention that a query gives to the first token, mean over queries")
    late: Annotated[Share, SHARE] = Field(description="attention of the last query to the first token")
    late_deviation: Annotated[Amount, SHARE] = Field(description="standard deviation of `late` over samples and heads")
    entropy: Annotated[Amount, SHARE] = Field(
        description="entropy of a query's weights, the weight of no token included, in nats"
    )
    largest_logit: Annotated[Number, near(PART_NATS, SUM)] = Field(description="largest logit, mean over samples and heads")
    rest: Annotated[Share | None, SHARE] = Field(None, description="attention that goes to no token")


class AttentionMetrics(Metrics):
    """Figures about the attention of heads."""

    samples: Annotated[Positive, EXACT] = Field(description="pieces of text")
    tokens: Annotated[Positive, EXACT] = Field(description="number of tokens of a sample")
    heads: Annotated[Positive, EXACT] = Field(description="query heads of all layers")
    sink_heads: Annotated[Share, SHARE] = Field(
        title="sink heads",
        description="sink metric: share of heads that give the first token more than epsilon, mean over samples",
    )
    sink_heads_interval: Annotated[Ends | None, SHARE] = Field(None, description="95 % interval over samples")
    first: Annotated[Share, SHARE] = Field(
        title="first token", description="attention to the first token, mean over queries, heads and samples"
    )
    first_interval: Annotated[Ends | None, SHARE] = Field(None, description="95 % interval over samples")
    first_by_head: Annotated[list[list[Share]], SHARE] = Field(
        description="attention to the first token by layer and head, mean over samples"
    )
    entropy: Annotated[Amount, SHARE] = Field(
        description="entropy of a query's weights in nats, mean over queries, heads and samples"
    )
    entropy_by_head: Annotated[list[list[Amount]], SHARE] = Field(description="entropy by layer and head")
    largest_logit: Annotated[Number, near(PART_NATS, SUM)] = Field(
        title="largest logit", description="largest logit of all heads and samples"
    )
    rest: Annotated[Share | None, SHARE] = Field(
        None, description="attention that goes to no token, if the model has such a sink"
    )
    layers: Annotated[list[LayerAttention], EXACT] = Field(description="layers of the model, in order")

    def headline(self) -> str:
        """Return the sink metric as a phrase."""
        return f"first token a sink of {100 * self.sink_heads:.0f} % of heads"


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
    return None if interval.ends is None else [*interval.ends]
