"""Scores a long text, read as one stream or several side by side."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvbench.harness.data.facts import told
from kvbench.harness.engine.decoder import Decoder
from kvbench.harness.records.aggregates import nll_figures, scored_mask
from kvbench.harness.tasks.perplexity.schema import PerplexityMetrics, PerplexityOptions
from kvbench.harness.tasks.task import Job, MeasurementError


def measure(options: PerplexityOptions, job: Job) -> PerplexityMetrics:
    """Score the stream; the trace gets one float32 NLL per token, NaN for tokens that are not scored."""
    nll = np.lib.format.open_memmap(job.trace, mode="w+", dtype="<f4", shape=(len(job.data.ids),))
    _allocate(job.trace)
    nll[:] = np.nan
    read = _score(options, job, nll)
    nll.flush()
    starts = [start for _, start in job.data.starts]
    figures = nll_figures(nll, job.data.prefix, starts, options.stride, options.streams or 1, options.prompt or 0)
    figures["bytes"] = int(job.data.byte_counts[np.isfinite(nll)].sum())  # of the scored tokens' text
    figures["bits_per_byte"] = figures["nll"] * figures["tokens"] / math.log(2) / max(1, figures["bytes"])
    if options.data == "prose":
        figures["facts"] = told(nll, job.data.byte_counts, options.data_seed or 0)
    sizes = {"kv_bytes": read.kv_bytes, "kv_held_bytes": read.held_bytes, "state_bytes": read.state_bytes}
    return PerplexityMetrics.from_json({**figures, **sizes})


def _allocate(path: Path) -> None:
    """Allocate the file's disk space, because writing to a mapped file on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _score(options: PerplexityOptions, job: Job, nll: NDArray[np.float32]) -> Decoder:
    """Read all streams side by side, and write each token's NLL in nats. Returns the decoder that has read them."""
    prefix, streams, prompt = job.data.prefix, options.streams or 1, options.prompt or 0
    text = torch.from_numpy(job.data.ids[prefix:])
    length = len(text) // streams
    opening = torch.from_numpy(job.data.ids[:prefix].copy()).expand(streams, -1)
    text_starts = prefix + length * np.arange(streams)[:, None]
    stride = 1 if job.config.policy.caches else options.stride
    is_scored = scored_mask(prefix + length, prefix, stride, prompt=prompt)
    read = job.decoder(streams)
    total, count = 0.0, 0

    def tokens(start: int, stop: int) -> Tensor:
        """Tokens of all streams, counted from the prefix on. [B, stop - start]."""
        body = torch.as_strided(text, (streams, length), (length, 1))
        part = torch.cat([opening[:, start:stop], body[:, max(0, start - prefix) : max(0, stop - prefix)]], 1)
        return part.long().to(job.model.device)

    end, begin = prefix + length - 1, prefix + prompt if prompt else 0  # no token follows the last one
    first_logits = read.read_prompt(tokens(0, begin), job.block)[:, None] if prompt else None
    starts = [*([begin - 1] if prompt else []), *range(begin, end, job.block)]
    for start, stop in itertools.pairwise([*starts, end]):
        scored = np.flatnonzero(is_scored[start + 1 : stop + 1])
        if first_logits is not None and start < begin:  # after the prompt's last token
            logits = first_logits[:, scored]
        else:
            keep = None if len(scored) == stop - start else torch.from_numpy(scored).to(job.model.device)
            logits = read(tokens(start, stop), keep=keep)
        if not len(scored):
            continue
        targets = tokens(start + 1, stop + 1)[:, scored]
        losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").cpu().numpy()
        if not np.isfinite(losses).all():
            first = scored[~np.isfinite(losses)[: len(scored)]][0]
            raise MeasurementError(f"NLL is not finite at token {start + 1 + int(first)}")
        nll[text_starts + (start + 1 - prefix + scored)] = losses.reshape(streams, -1)
        total, count = total + float(losses.sum(dtype=np.float64)), count + losses.size
        job.progress(stop * streams, f"perplexity {math.exp(min(total / count, 700)):.2f}")
    return read
