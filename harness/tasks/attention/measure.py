"""Watches a model read samples, under full attention or a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.watch import NotWatchableError, check, watch
from kvbench.harness.tasks.attention.data import Samples
from kvbench.harness.tasks.attention.figures import figures, massive_activations, sink_tokens
from kvbench.harness.tasks.attention.notes import Lost, Notes
from kvbench.harness.tasks.attention.schema import AttentionMetrics, AttentionOptions
from kvbench.harness.tasks.attention.under_policy import Recorder, recorded
from kvbench.harness.tasks.task import Job, MeasurementError

_CHECKED_TOKENS = 48
_STEPS_AT_ONCE = 64  # of a policy, kept until they are shown


def measure(options: AttentionOptions, job: Job) -> AttentionMetrics:
    """Look at every sample; the trace gets what was noted of each.

    Raises:
        MeasurementError: the model's attention can't be shown, or the policy keeps no cache.
    """
    if not job.config.policy.caches:
        raise MeasurementError("it keeps no cache, so nothing is evicted, and its attention is that of many short texts")
    samples: Samples = job.data
    album, at_once = _Album(samples), max(1, job.block // options.tokens)
    sizes: dict[str, int] = {}
    try:
        check(job.model.hf, input_ids=samples.batch(0, 1)[:, :_CHECKED_TOKENS].to(job.model.device))
        for start in range(0, options.samples, at_once):
            ids = samples.batch(start, min(options.samples, start + at_once)).to(job.model.device)
            notes, lost = Notes(options.tokens, options.map_tokens), None
            if job.config.policy.evicts:
                lost, sizes = _under_policy(options, job, ids, notes)
            else:
                watch(job.model.hf, notes, input_ids=ids)
            album.add(start, notes, lost, options.epsilon)
            job.progress(start * options.tokens + ids.numel(), f"first token {album.mean('first'):.3f}")
    except NotWatchableError as error:
        raise MeasurementError(str(error)) from None
    noted = album.noted()
    with job.trace.open("wb") as file:
        np.savez_compressed(file, **noted, **album.means())  # type: ignore[arg-type]
    return AttentionMetrics.from_json({**figures(noted, options.epsilon), **album.lists(), **sizes})


def _under_policy(options: AttentionOptions, job: Job, ids: Tensor, notes: Notes) -> tuple[Lost, dict[str, int]]:
    """Read samples under the policy, and look at what full attention gives to the tokens that it evicts.

    Returns:
        The attention lost, and the bytes of the cache of a sample.
    """
    recorder = Recorder(job.model.layers, len(ids), options.tokens, ids.device)
    decoder = CachedDecoder(job.model, recorded(job.config, recorder), len(ids))
    start = options.prompt or 0
    if start:
        recorder.begin(0, start)
        decoder.read_prompt(ids[:, :start], job.block)
        recorder.show(notes)
    for first in range(start, options.tokens, _STEPS_AT_ONCE):
        stop = min(options.tokens, first + _STEPS_AT_ONCE)
        recorder.begin(first, stop)
        decoder(ids[:, first:stop], keep=torch.zeros(1, dtype=torch.int64, device=ids.device))
        recorder.show(notes)
    lost = Lost(options.tokens, recorder.last_seen)
    watch(job.model.hf, lost, input_ids=ids)
    return lost, {"kv_bytes": decoder.kv_bytes // len(ids), "kv_held_bytes": decoder.held_bytes // len(ids)}


class _Album:
    """The notes of all samples."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._arrays: dict[str, list[NDArray[Any]]] = {}
        self._queries: NDArray[Any] | None = None
        self._count = 0
        self._received: NDArray[np.float64] | float = 0.0  # summed over samples. [L, Q, T]
        self._maps: NDArray[np.float32] | float = 0.0  # likewise. [L, Q, M, M]
        self._sinks: list[tuple[str, int, float]] = []
        self._massive: list[tuple[int, int, str, int, float]] = []

    def add(self, start: int, notes: Notes, lost: Lost | None, epsilon: float) -> None:
        """Add the samples from number `start` on."""
        arrays = notes.arrays()
        if lost is not None:
            arrays, self._queries = arrays | {"lost": lost.of_samples()}, lost.queries
        for name, x in arrays.items():
            self._arrays.setdefault(name, []).append(x)
        count = len(arrays["first"])
        self._count += count
        self._received = self._received + notes.mean_received().sum(1).cpu().numpy()
        self._maps = self._maps + count * notes.logit_maps()
        text = self._samples.text
        self._sinks += [(text(start + s, p), p, share) for s, p, share in notes.other_sinks(epsilon)]
        self._massive += [(layer, dim, text(start + s, p), p, size) for layer, s, p, dim, size in notes.massive]

    def mean(self, name: str) -> float:
        """Mean of a note so far."""
        return float(np.concatenate(self._arrays[name]).mean())

    def noted(self) -> dict[str, NDArray[Any]]:
        """What `figures` needs."""
        noted = {name: np.concatenate(x) for name, x in self._arrays.items()}
        noted["tokens"] = np.array(self._samples.length)
        if self._queries is not None:
            noted["queries"] = self._queries
        return noted

    def means(self) -> dict[str, NDArray[Any]]:
        """Attention that each token gets, [L, Q, T], and maps of logits, [L, Q, M, M]: means over samples."""
        return {"received": np.float32(self._received / self._count), "logits": np.float32(self._maps / self._count)}  # type: ignore[dict-item]

    def lists(self) -> dict[str, Any]:
        """Sinks other than the first token, and massive activations."""
        return {"sinks": sink_tokens(self._sinks), "massive": massive_activations(self._massive)}
