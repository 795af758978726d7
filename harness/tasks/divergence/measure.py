"""Reads samples twice, under full attention and under a policy, and compares the predictions.

Axis letters: B samples side by side, T tokens of a block, V vocabulary, R rows compared at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig, Decoder
from kvbench.harness.engine.method import EAGER
from kvbench.harness.tasks.common.samples import Samples
from kvbench.harness.tasks.divergence.schema import COMPARED, DivergenceMetrics, DivergenceOptions, figures
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.policies.dense import Dense

_ROWS = 64  # compared at once, in float64


def measure(options: DivergenceOptions, job: Job) -> DivergenceMetrics:
    """Compare the predictions of every sample's tokens; the trace gets them as `COMPARED`.

    Raises:
        MeasurementError: samples are longer than those the model was trained on, or a prediction is not finite.
    """
    samples: Samples = job.data
    trained = job.model.training_length
    if trained is not None and options.tokens > trained:
        raise MeasurementError(
            f"dense is a reference up to its training length: samples of {options.tokens:,} tokens are longer than {trained:,}"
        )
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


def _compared(ids: Tensor, dense: Decoder, read: Decoder, prompt: int, block: int) -> NDArray[np.void]:
    """Read samples, [B, T] int64, with both decoders, full attention's and the policy's.

    `block` tokens of each sample pass a layer at once; the first `prompt` tokens are the prompt. The result has the predictions
    of all tokens after the first, or after the prompt. [B, P] `COMPARED`.
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

    KL(dense || policy) = sum over the vocabulary of p (log p - log q), p the probabilities under dense, q under the policy.

    Raises:
        MeasurementError: a KL divergence is not finite.
    """
    result = np.empty(targets.numel(), COMPARED)
    rows = zip(dense.flatten(0, 1).split(_ROWS), policy.flatten(0, 1).split(_ROWS), targets.flatten().split(_ROWS), strict=True)
    for number, (theirs, ours, target) in enumerate(rows):
        part = result[number * _ROWS : number * _ROWS + len(target)]
        p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)  # [R, V]
        part["kl"] = (p.exp() * (p - q)).sum(-1).clamp(min=0).cpu().numpy()  # rounding may take it below 0
        part["agrees"] = (theirs.argmax(-1) == ours.argmax(-1)).cpu().numpy()
        part["nll"], part["dense_nll"] = (-x.gather(-1, target[:, None])[:, 0].cpu().numpy() for x in (q, p))
    if not np.isfinite(result["kl"]).all():
        raise MeasurementError("a KL divergence is not finite")
    return result.reshape(tuple(targets.shape))
