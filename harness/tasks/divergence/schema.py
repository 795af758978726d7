"""Options and figures of the divergence task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbench.harness.records.metrics import Metrics
from kvbench.harness.records.rules import EXACT, MEAN_NATS, PART_NATS, RUN_NATS, SUM, near
from kvbench.harness.records.types import Amount, Count, Nats, Number, Part, Positive, Share
from kvbench.harness.tasks.common.samples import SampleOptions

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
