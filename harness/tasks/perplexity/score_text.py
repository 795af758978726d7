"""Scoring of a long text, read as one stream or as several streams side by side."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvbench.harness.core.errors import ran_out_of_memory
from kvbench.harness.core.perplexity import perplexity
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.data.prose import fact_costs
from kvbench.harness.engine.decoder import Decoder
from kvbench.harness.engine.loop import read_bytes
from kvbench.harness.records.aggregates import nll_figures, scored_mask
from kvbench.harness.records.metrics import Look, NllMetrics
from kvbench.harness.tasks.perplexity.perplexity_options import PerplexityMetrics, PerplexityOptions, Precision
from kvbench.harness.tasks.task import Job, MeasurementError


def measure(options: PerplexityOptions, job: Job) -> PerplexityMetrics:
    """Score the stream, and write one float32 NLL per token to the trace, NaN for tokens that are not scored.

    Raises:
        MeasurementError: an NLL is not finite, or the reference has no figures to compare with.
    """
    precision = _precision(options, job)
    nll = np.lib.format.open_memmap(job.trace, mode="w+", dtype="<f4", shape=(len(job.data.ids),))
    _allocate(job.trace)
    nll[:] = np.nan
    looks, sizes = _read(options, job, nll, precision)
    nll.flush()
    figures = _figures(options, job, _cut(job.trace, nll[: job.data.prefix + looks[-1].tokens]) if looks else nll)
    if precision is not None:
        figures |= {"tokens_read": looks[-1].tokens, "looks": precision.looks(looks).model_dump()}
    return PerplexityMetrics.from_json({**figures, **sizes})


def _figures(options: PerplexityOptions, job: Job, nll: NDArray[np.float32]) -> dict[str, Any]:
    """Compute the figures of the tokens that were read. nll: nats of the stream, or of its beginning. [N]."""
    starts, byte_counts = [start for _, start in job.data.starts], job.data.byte_counts[: len(nll)]
    figures = nll_figures(
        nll, job.data.prefix, starts, options.stride, options.streams or 1, options.prompt or 0, len(job.data.ids)
    )
    figures["bytes"] = int(byte_counts[np.isfinite(nll)].sum())  # bytes of the scored tokens' text
    figures["bits_per_byte"] = figures["nll"] * figures["tokens"] / math.log(2) / max(1, figures["bytes"])
    if options.data == "prose" and "stream_tokens" not in figures:  # a stream does not know what another one told
        figures["facts"] = fact_costs(nll, byte_counts, options.data_seed or 0)
    return figures


def _allocate(path: Path) -> None:
    """Allocate the file's disk space, because writing to a mapped file on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _cut(path: Path, nll: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut the trace to the beginning that was read. Return the new file's array, mapped from disk."""
    path.unlink()  # a mapped file must not be overwritten
    with path.open("wb") as file:
        np.save(file, nll)
    return np.lib.format.open_memmap(path, mode="r+")


def _read(
    options: PerplexityOptions, job: Job, nll: NDArray[np.float32], precision: Precision | None
) -> tuple[list[Look], Counter[str]]:
    """Read, and write NLLs, until the interval is narrow or the text ends.

    Returns:
        The looks taken, and the summed bytes of all streams' caches, whether they were held at once or one after another.

    Raises:
        MemoryError: several streams at once don't fit into memory.
    """
    looks: list[Look] = []
    sizes: Counter[str] = Counter()
    streams, so_far = options.streams or 1, np.zeros(2)
    at_once = streams if job.all_at_once else options.side_by_side or streams
    for first in range(0, streams, at_once):
        part = range(first, min(first + at_once, streams))
        try:
            read = job.decoder(len(part))
            for known in _score(options, job, read, nll, [] if precision is None else precision.lengths, part, so_far):
                if precision is not None and known - job.data.prefix in precision.lengths:
                    looks.append(precision.look(nll[:known]))
                    if precision.is_narrow(looks[-1]):
                        break
        except Exception as error:
            if len(part) == 1 or not ran_out_of_memory(error):
                raise
            raise MemoryError(f"{len(part)} streams at once don't fit: give side_by_side: {len(part) // 2}") from error
        sizes.update(kv_bytes=read.kv_bytes, kv_held_bytes=read.held_bytes, state_bytes=read.state_bytes)
        if (selected := read_bytes(read)) is not None:
            sizes.update(kv_read_bytes=selected)
        del read  # free its cache before the next decoder is created
    return looks, sizes


def _precision(options: PerplexityOptions, job: Job) -> Precision | None:
    """Return the looks that decide when to stop reading; None if all of the text is read.

    Raises:
        MeasurementError: the reference has no figures, or its figures have a trend.
    """
    until, data, trained = options.until, job.data, job.model.training_length
    if until is not None and until.reference == "dense" and trained is not None and data.tokens > trained:
        raise MeasurementError(
            f"dense has a trend past its training length of {trained:,} tokens, so nothing is compared with it there: "
            "lower tokens, or give until the reference recompute_window"
        )
    if until is None or job.reference is None:
        return None
    figures, starts = job.reference.measured(NllMetrics), [start for _, start in data.starts]
    if figures is None:
        raise MeasurementError(f"its reference {job.reference.cell.policy} failed, so there is nothing to compare with")
    file = f"{job.reference.stem}.json"
    return Precision(options, until, data.prefix, data.tokens, starts, job.config.capacity or 0, figures, file)


def _score(
    options: PerplexityOptions,
    job: Job,
    read: Decoder,
    nll: NDArray[np.float32],
    looks: Sequence[int],
    part: range,
    so_far: NDArray[np.float64],
) -> Iterator[int]:
    """Read the streams numbered `part` side by side with an empty decoder, and write each token's NLL.

    Args:
        nll: receives nats per token. [N].
        looks: numbers of tokens after which a block ends.
        so_far: sum of all NLLs and their number, updated for progress. [2].

    Yields:
        After each block, the number of tokens of a stream that have an NLL, the prefix included.
    """
    prefix, streams, prompt = job.data.prefix, len(part), options.prompt or 0
    length = (len(job.data.ids) - prefix) // (options.streams or 1)
    text = torch.from_numpy(job.data.ids[prefix + length * part.start :])
    opening = torch.from_numpy(job.data.ids[:prefix].copy()).expand(streams, -1)
    text_starts = prefix + length * np.array(part)[:, None]
    stride = 1 if holds_kv(job.config.policy) else options.stride
    is_scored = scored_mask(prefix + length, prefix, stride, prompt=prompt)

    def tokens(start: int, stop: int) -> Tensor:
        """Return the tokens of all streams from `start` to `stop` - 1, counted from the prefix on. [B, stop - start]."""
        body = torch.as_strided(text, (streams, length), (length, 1))
        part = torch.cat([opening[:, start:stop], body[:, max(0, start - prefix) : max(0, stop - prefix)]], 1)
        return part.long().to(job.model.device)

    end, begin = prefix + length - 1, prefix + prompt if prompt else 0  # no token follows the last
    first_logits = read.read_prompt(tokens(0, begin), job.block)[:, None] if prompt else None
    ends = {prefix + look - 1 for look in looks if prefix + look - 1 > begin}
    starts = [*([begin - 1] if prompt else []), *sorted({*range(begin, end, job.block), *ends, end})]
    for start, stop in itertools.pairwise(starts):
        scored = np.flatnonzero(is_scored[start + 1 : stop + 1])
        if first_logits is not None and start < begin:  # after the prompt's last token
            logits = first_logits[:, scored]
        else:
            keep = None if len(scored) == stop - start else torch.from_numpy(scored).to(job.model.device)
            logits = read(tokens(start, stop), keep=keep)
        if not len(scored):
            yield stop + 1
            continue
        targets = tokens(start + 1, stop + 1)[:, scored]
        losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").cpu().numpy()
        if not np.isfinite(losses).all():
            first = scored[~np.isfinite(losses)[: len(scored)]][0]
            raise MeasurementError(f"NLL is not finite at token {start + 1 + int(first)}")
        nll[text_starts + (start + 1 - prefix + scored)] = losses.reshape(streams, -1)
        so_far += losses.sum(dtype=np.float64), losses.size
        total_nll, scored_tokens = so_far
        job.progress(length * part.start + stop * streams, f"perplexity {perplexity(total_nll / scored_tokens):.2f}")
        yield stop + 1
