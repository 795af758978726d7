"""Divergence of predictions under a policy from those of dense: KL divergence, and share of equal top tokens.

The NLL depends on one token of the vocabulary, the next token of the text. The KL divergence depends on all tokens. It is 0 only
if the prediction is unchanged, so chance cannot hide a change.

Source: Kullback and Leibler 1951, Annals of Mathematical Statistics 22(1).

Axis letters: N samples, P positions of a sample whose token is predicted, B samples side by side, T tokens of a block,
V vocabulary, R rows compared at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvbench.harness.core.intervals import Interval, over_samples
from kvbench.harness.records import Record
from kvbench.harness.records.aggregates import buckets
from kvbench.harness.records.figure_rules import EXACT, MEAN_NATS, PART_NATS, RUN_NATS, SUM, Compared, near
from kvbench.harness.records.metrics import SampleMetrics
from kvbench.harness.records.types import Amount, Count, Ends, Nats, Part, Share
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.markdown import measured_table, percent, policy_table, task_line, with_ends
from kvbench.harness.report.rows import kv_cells
from kvbench.harness.tasks.common.samples import SampleOptions, Samples, SampleTask
from kvbench.harness.tasks.task import Job, MeasurementError

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.harness.engine.decoder import Decoder

_SHARE = near(2e-3)  # rounding may change the top token where two are about as likely
_ROWS = 64  # predictions compared at once, in float64


class DivergenceOptions(SampleOptions):
    """Options of the divergence task."""

    name: Literal["divergence"] = "divergence"
    samples: int = Field(128, ge=1, le=100_000, description="pieces of the text that are read, one after the other")
    tokens: int = Field(
        256, ge=2, le=2**20, description="length of a sample, the tokens that open it included; at most the training length"
    )


class DivergenceAt(Part):
    """Divergence of predictions between two positions of a sample."""

    from_: Annotated[Count, EXACT] = Field(alias="from", description="first position")
    to: Annotated[Count, EXACT] = Field(description="first position after the bucket")
    kl: Annotated[Amount, near(PART_NATS)] = Field(description="mean KL divergence, nats per token")
    agreement: Annotated[Share, _SHARE] = Field(description="share of tokens with the same top token")


class SampleSums(Part):
    """Sums over each sample, for paired differences between policies."""

    kl: Annotated[list[Amount], near(RUN_NATS, SUM)] = Field(description="summed KL divergence, nats")
    agreed: Annotated[list[Count], near(2)] = Field(description="predictions with the same top token")


class DivergenceMetrics(SampleMetrics):
    """Divergence of predictions under a policy from those of dense."""

    kl: Annotated[Amount, near(MEAN_NATS), Compared(0.001, more_is_better=False, sums="sums.kl")] = Field(
        description="KL(dense || policy), mean over predictions, nats per token"
    )
    kl_interval: Annotated[Ends | None, near(PART_NATS)] = Field(
        None, description="95 % interval of `kl`; None if the text is too short"
    )
    agreement: Annotated[Share, _SHARE, Compared(0.01, more_is_better=True, sums="sums.agreed")] = Field(
        description="share of predictions with the same top token as dense"
    )
    agreement_interval: Annotated[Ends | None, _SHARE] = Field(None, description="95 % interval of `agreement`")
    nll: Annotated[Nats, near(MEAN_NATS)] = Field(description="mean NLL under the policy, nats per token")
    nll_change: Annotated[Nats, near(MEAN_NATS)] = Field(
        description="mean NLL under the policy minus mean NLL under dense, nats per token"
    )
    nll_change_interval: Annotated[Ends | None, near(PART_NATS)] = Field(None, description="95 % interval of `nll_change`")
    by_position: Annotated[list[DivergenceAt], EXACT] = Field(description="divergence and agreement by position in the sample")
    sums: SampleSums = Field(description="sums over each sample")
    kv_bytes: Annotated[Count | None, near()] = Field(None, description="bytes allocated for K and V of one sample")

    def headline(self) -> str:
        """Return the KL divergence and the agreement."""
        return f"KL {self.kl:.4g} nats, top token {100 * self.agreement:.1f} % the same"


# Entry of the trace for each prediction: KL(dense || policy) in nats, whether the top token is the same, and the NLL of the next
# token in nats under the policy and under dense.
COMPARED = np.dtype([("kl", "<f4"), ("agrees", "?"), ("nll", "<f4"), ("dense_nll", "<f4")])


def figures(compared: NDArray[np.void], tokens: int) -> dict[str, Any]:
    """Compute the figures of a record from the predictions of each sample's last P tokens.

    Args:
        compared: comparison of each prediction. [N, P] `COMPARED`.
        tokens: length of a sample.
    """
    kl, agrees = compared["kl"].astype(np.float64), compared["agrees"]
    nll = compared["nll"].astype(np.float64)
    change = nll - compared["dense_nll"]
    result: dict[str, Any] = {
        "samples": len(kl),
        "tokens": kl.size,
        "kl": float(kl.mean()),
        "agreement": float(agrees.mean()),
        "nll": float(nll.mean()),
        "nll_change": float(change.mean()),
        "kl_interval": _ends(over_samples(kl.sum(1), kl.shape[1]), low=0.0),
        "agreement_interval": _ends(over_samples(agrees.sum(1), kl.shape[1]), low=0.0, high=1.0),
        "nll_change_interval": _ends(over_samples(change.sum(1), kl.shape[1])),
        "sums": {"kl": [round(x, 5) for x in kl.sum(1).tolist()], "agreed": agrees.sum(1).tolist()},
    }
    first = tokens - kl.shape[1]  # position of the first token that is predicted
    parts = [(start, stop, slice(max(start - first, 0), max(stop - first, 0))) for start, stop in buckets(tokens)]
    result["by_position"] = [
        {"from": start, "to": stop, "kl": float(kl[:, part].mean()), "agreement": float(agrees[:, part].mean())}
        for start, stop, part in parts
        if kl[:, part].size
    ]
    return {name: x for name, x in result.items() if x is not None}


def _ends(mean: Interval, low: float = -np.inf, high: float = np.inf) -> list[float] | None:
    """Return an interval's ends, clipped to the range of the figure; None if the text is too short for an interval."""
    return None if mean.ends is None else np.clip(mean.ends, low, high).tolist()


class Divergence(SampleTask):
    """KL(dense || policy) of each next token, on samples no longer than the model's training length."""

    options = DivergenceOptions
    metrics = DivergenceMetrics
    trace = ".divergence.npy"

    @staticmethod
    def run(options: DivergenceOptions, job: Job) -> DivergenceMetrics:
        """Read every sample with and without the policy, and write the comparisons to the trace as `COMPARED`.

        Raises:
            MeasurementError: samples are longer than the model's training length, or a prediction is not finite.
        """
        from kvbench.harness.engine.decoder import CacheConfig
        from kvbench.harness.engine.method import EAGER
        from kvbench.policies.dense import Dense

        samples: Samples = job.data
        trained = job.model.training_length
        if trained is not None and options.tokens > trained:
            limit = f"samples of {options.tokens:,} tokens are longer than {trained:,}"
            raise MeasurementError(f"dense is a reference up to its training length: {limit}")
        at_once = max(1, job.block // options.tokens)
        parts: list[NDArray[np.void]] = []
        sizes: dict[str, int] = {}
        for start in range(0, options.samples, at_once):
            ids = samples.batch(start, min(options.samples, start + at_once)).to(job.model.device)
            dense, read = job.open(job.model, CacheConfig(Dense()), len(ids), EAGER), job.decoder(len(ids))
            parts.append(_compared(ids, dense, read, options.prompt or 0, max(1, job.block // len(ids))))
            sizes = {
                "kv_bytes": read.kv_bytes // len(ids),
                "kv_held_bytes": read.held_bytes // len(ids),
                "state_bytes": read.state_bytes // len(ids),
            }
            job.progress(samples.tokens * (start + len(ids)) // options.samples, f"KL {np.mean(parts[-1]['kl']):.4f}")
        compared = np.concatenate(parts)
        with job.trace.open("wb") as file:
            np.save(file, compared)
        return DivergenceMetrics.from_json({**figures(compared, options.tokens), **sizes})

    @classmethod
    def from_trace(cls, record: Record, trace: IO[bytes]) -> Mapping[str, Any]:
        """Recompute all figures from the trace, except bytes."""
        return figures(np.load(trace), record.cell.task_options(DivergenceOptions).tokens)

    @classmethod
    def cached_tokens(cls, record: Record) -> int | None:
        """Return the largest number of a sample's tokens in the cache. An unbounded cache holds all but the unread last token."""
        bounded = record.cell.capacity is not None or record.cell.evict == "prompt"
        return super().cached_tokens(record) if bounded else record.cell.task_options(DivergenceOptions).tokens - 1

    @classmethod
    def body(cls, records: Sequence[Record]) -> list[str | Chart]:
        """Return a row per policy, then KL divergence by position."""
        about = (
            f"{task_line(records[0])}KL divergence from dense to the policy, in nats per token: 0 where nothing has changed. "
            "Top-1 agreement: how often both find the same token most likely. With 95 % intervals:\n"
        )
        return [about, *measured_table(records, DivergenceMetrics, _row), *_by_position(records)]


def _row(record: Record, m: DivergenceMetrics) -> dict[str, str]:
    """Return the cells of a record's row, by heading."""
    return {
        "KL": with_ends(m.kl, m.kl_interval, "{:.4g}".format),
        "top-1 agreement": percent(m.agreement, m.agreement_interval),
        "Δ NLL to dense": with_ends(m.nll_change, m.nll_change_interval, "{:+.4f}".format),
        **kv_cells(record, [record]),
    }


def _by_position(records: Sequence[Record]) -> list[str]:
    """Return a table of KL divergence by the position of the predicted token."""
    measured = [(r, m.by_position) for r in records if (m := r.measured(DivergenceMetrics))]
    rows = [(r, {f"{part.from_:,} to {part.to:,}": f"{part.kl:.4g}" for part in parts}) for r, parts in measured]
    return ["KL divergence by position in the sample:\n", *policy_table(rows, records)] if rows else []


def _compared(ids: Tensor, dense: Decoder, read: Decoder, prompt: int, block: int) -> NDArray[np.void]:
    """Read samples with the decoder of full attention and the decoder of the policy, and compare their predictions.

    Args:
        ids: token ids. [B, T] int64.
        dense: decoder of full attention.
        read: decoder of the policy.
        prompt: number of first tokens that are the prompt.
        block: tokens of each sample that pass a layer at once.

    Returns:
        Comparisons of the predictions of all tokens after the first, or after the prompt. [B, P] `COMPARED`.
    """
    parts = []
    if prompt:
        logits = [decoder.read_prompt(ids[:, :prompt], block)[:, None] for decoder in (dense, read)]
        parts.append(compare(logits[0], logits[1], ids[:, prompt : prompt + 1]))
    for start in range(prompt, ids.shape[1] - 1, block):
        stop = min(start + block, ids.shape[1] - 1)  # no token follows the last
        tokens = ids[:, start:stop]
        parts.append(compare(dense(tokens), read(tokens), ids[:, start + 1 : stop + 1]))
    return np.concatenate(parts, 1)


def compare(dense: Tensor, policy: Tensor, targets: Tensor) -> NDArray[np.void]:
    """Compare predictions of the same tokens, in float64. Logits [B, T, V] and targets [B, T] int64 -> [B, T] `COMPARED`.

    KL(dense || policy) is the sum over the vocabulary of p (log p - log q). p are the probabilities under dense, q under the
    policy.

    Raises:
        MeasurementError: a KL divergence is not finite.
    """
    result = np.empty(targets.numel(), COMPARED)
    rows = zip(dense.flatten(0, 1).split(_ROWS), policy.flatten(0, 1).split(_ROWS), targets.flatten().split(_ROWS), strict=True)
    for number, (theirs, ours, target) in enumerate(rows):
        part = result[number * _ROWS : number * _ROWS + len(target)]
        p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)  # [R, V]
        part["kl"] = (p.exp() * (p - q)).sum(-1).clamp(min=0).cpu().numpy()  # rounding may give a negative sum
        part["agrees"] = (theirs.argmax(-1) == ours.argmax(-1)).cpu().numpy()
        part["nll"], part["dense_nll"] = (-x.gather(-1, target[:, None])[:, 0].cpu().numpy() for x in (q, p))
    if not np.isfinite(result["kl"]).all():
        raise MeasurementError("a KL divergence is not finite")
    return result.reshape(tuple(targets.shape))
