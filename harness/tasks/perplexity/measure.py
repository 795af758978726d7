"""Scores a long text, read as one stream or several side by side."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvbench.harness.data.facts import told
from kvbench.harness.records.aggregates import nll_figures, scored_mask
from kvbench.harness.tasks.perplexity.schema import PerplexityMetrics, PerplexityOptions
from kvbench.harness.tasks.task import Job, MeasurementError


def measure(options: PerplexityOptions, job: Job) -> PerplexityMetrics:
    """Score the stream; the trace gets one float32 NLL per token, NaN for tokens that are not scored."""
    nll = np.lib.format.open_memmap(job.trace, mode="w+", dtype="<f4", shape=(len(job.data.ids),))
    _allocate(job.trace)
    nll[:] = np.nan
    kv_bytes, state_bytes = _score(options, job, nll)
    nll.flush()
    figures = nll_figures(nll, job.data.prefix, [start for _, start in job.data.starts], options.stride, options.streams or 1)
    figures["bytes"] = int(job.data.byte_counts[np.isfinite(nll)].sum())  # of the scored tokens' text
    figures["bits_per_byte"] = figures["nll"] * figures["tokens"] / math.log(2) / max(1, figures["bytes"])
    if options.data == "prose":
        figures["facts"] = told(nll, job.data.byte_counts, options.data_seed or 0)
    return PerplexityMetrics.from_json({**figures, "kv_bytes": kv_bytes, "state_bytes": state_bytes})


def _allocate(path: Path) -> None:
    """Allocate the file's disk space, because writing to a mapped file on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _score(options: PerplexityOptions, job: Job, nll: NDArray[np.float32]) -> tuple[int, int]:
    """Read all streams side by side, and write each token's NLL in nats. Returns bytes of K/V and of state at the end."""
    prefix, streams = job.data.prefix, options.streams or 1
    text = torch.from_numpy(job.data.ids[prefix:])
    length = len(text) // streams
    opening = torch.from_numpy(job.data.ids[:prefix].copy()).expand(streams, -1)
    text_starts = prefix + length * np.arange(streams)[:, None]
    stride = 1 if job.config.policy.caches else options.stride
    is_scored = scored_mask(prefix + length, prefix, stride)
    read = job.decoder(streams)
    total, count = 0.0, 0

    def tokens(start: int, stop: int) -> Tensor:
        """Tokens of all streams, counted from the prefix on. [B, stop - start]."""
        body = torch.as_strided(text, (streams, length), (length, 1))
        return torch.cat([opening[:, start:stop], body[:, max(0, start - prefix) : max(0, stop - prefix)]], 1).long()

    end = prefix + length - 1  # no token follows the last one
    for start in range(0, end, job.block):
        stop = min(start + job.block, end)
        scored = np.flatnonzero(is_scored[start + 1 : stop + 1])
        keep = None if len(scored) == stop - start else torch.from_numpy(scored).to(job.model.device)
        logits = read(tokens(start, stop).to(job.model.device), keep=keep)
        if not len(scored):
            continue
        targets = tokens(start + 1, stop + 1)[:, scored].to(job.model.device)
        losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").cpu().numpy()
        if not np.isfinite(losses).all():
            first = scored[~np.isfinite(losses)[: len(scored)]][0]
            raise MeasurementError(f"NLL is not finite at token {start + 1 + int(first)}")
        nll[text_starts + (start + 1 - prefix + scored)] = losses.reshape(streams, -1)
        total, count = total + float(losses.sum(dtype=np.float64)), count + losses.size
        job.progress(stop * streams, f"perplexity {math.exp(min(total / count, 700)):.2f}")
    return read.kv_bytes, read.state_bytes
