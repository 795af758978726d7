"""Watches a model read samples, under full attention or a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.watch import NotWatchableError, check, watch
from kvbench.harness.tasks.attention.figures import figures, massive_activations, sink_tokens
from kvbench.harness.tasks.attention.images import ImageSamples
from kvbench.harness.tasks.attention.notes import Lost, Notes
from kvbench.harness.tasks.attention.schema import MOST_SHOWN, AttentionMetrics, AttentionOptions
from kvbench.harness.tasks.attention.under_policy import read_recorded
from kvbench.harness.tasks.common.samples import Samples
from kvbench.harness.tasks.task import Job, MeasurementError

AnySamples = Samples | ImageSamples


def measure(options: AttentionOptions, job: Job) -> AttentionMetrics:
    """Look at every sample; the trace gets what was noted of each.

    Raises:
        MeasurementError: the model's attention can't be shown, or the policy keeps no cache.
    """
    if isinstance(job.config.policy, Contestant):
        raise MeasurementError("what somebody else's cache keeps can't be seen: this task is for policies in our own loop")
    if not job.config.policy.caches:
        raise MeasurementError("it keeps no cache, so nothing is evicted, and its attention is that of many short texts")
    if not job.config.policy.evicts and job.config.positions == "clamped":
        raise MeasurementError("full attention is the model's own, which doesn't clamp positions: leave `positions` out")
    samples: AnySamples = job.data
    album, at_once = _Album(samples), max(1, job.block // samples.length)
    sizes: dict[str, int] = {}
    try:
        sunk = check(job.model.hf, **_onto(job.model, samples.checked()))
        for start in range(0, options.samples, at_once):
            stop = min(options.samples, start + at_once)
            inputs = _onto(job.model, samples.inputs(start, stop))
            notes, lost = Notes(samples.length, options.map_tokens), None
            if job.config.policy.evicts:
                ids, prompt = inputs["input_ids"], options.prompt or 0
                decoder, last_seen = read_recorded(job.model, job.config, ids, prompt, notes, sunk)
                sizes = _sizes(decoder)
                lost = Lost(samples.length, last_seen)
                watch(job.model.hf, lost, **inputs)
            else:
                watch(job.model.hf, notes, **inputs)
            album.add(start, notes, lost, options.epsilon)
            job.progress(samples.tokens * stop // options.samples, f"first token {album.mean('first'):.3f}")
    except NotWatchableError as error:
        raise MeasurementError(str(error)) from None
    noted = album.noted()
    with job.trace.open("wb") as file:
        np.savez_compressed(file, **noted, **album.means())  # type: ignore[arg-type]
    return AttentionMetrics.from_json({**figures(noted, options.epsilon, options.norm_cutoff), **album.lists(), **sizes})


def _onto(model: Model, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs on the model's device; pixels in its dtype, too."""
    return {name: x.to(model.device, model.dtype if x.is_floating_point() else None) for name, x in inputs.items()}


def _sizes(decoder: CachedDecoder) -> dict[str, int]:
    """Bytes of one sample's cache, unless they depend on the sample."""
    if decoder.config.capacity is None:
        return {}
    return {"kv_bytes": decoder.kv_bytes // decoder.streams, "kv_held_bytes": decoder.held_bytes // decoder.streams}


class _Album:
    """The notes of all samples."""

    def __init__(self, samples: AnySamples) -> None:
        self._samples = samples
        self._arrays: dict[str, list[NDArray[Any]]] = {}
        self._queries: NDArray[Any] | None = None
        self._count = 0
        self._received: NDArray[np.float64] | float = 0.0  # summed over samples. [L, Q, T]
        self._energies: dict[str, NDArray[np.float64]] = {}  # of keys and values, likewise. [L, H, D] each
        self._maps: NDArray[np.float32] | float = 0.0  # likewise. [L, Q, M, M]
        self._sinks: list[tuple[str, int, float]] = []
        self._massive: list[tuple[int, int, str, int, float]] = []

    def add(self, start: int, notes: Notes, lost: Lost | None, epsilon: float) -> None:
        """Add the samples from number `start` on."""
        arrays = notes.arrays()
        if isinstance(self._samples, ImageSamples):
            arrays |= notes.by_token()
        if lost is not None:
            arrays, self._queries = arrays | {"lost": lost.of_samples()}, lost.queries
        for name, x in arrays.items():
            self._arrays.setdefault(name, []).append(x)
        count = len(arrays["first"])
        self._count += count
        self._received = self._received + notes.mean_received().sum(1).cpu().numpy()
        self._maps = self._maps + count * notes.logit_maps()
        self._energies = {name: self._energies.get(name, 0) + x for name, x in notes.energies().items()}
        text = self._samples.text
        self._sinks += [(text(start + s, p)[:MOST_SHOWN], p, share) for s, p, share in notes.other_sinks(epsilon)]
        self._massive += [(layer, dim, text(start + s, p)[:MOST_SHOWN], p, size) for layer, s, p, dim, size in notes.massive]

    def mean(self, name: str) -> float:
        """Mean of a note so far."""
        return float(np.concatenate(self._arrays[name]).mean())

    def noted(self) -> dict[str, NDArray[Any]]:
        """What `figures` needs."""
        noted = {name: np.concatenate(x) for name, x in self._arrays.items()} | self._energies
        noted["tokens"] = np.array(self._samples.length)
        if isinstance(self._samples, ImageSamples):
            layout = self._samples.layout
            noted["grid"] = np.array([layout.rows, layout.columns, layout.special, layout.registers])
        if self._queries is not None:
            noted["queries"] = self._queries
        return noted

    def means(self) -> dict[str, NDArray[Any]]:
        """Attention that each token gets, [L, Q, T], and maps of logits, [L, Q, M, M]: means over samples."""
        return {"received": np.float32(self._received / self._count), "logits": np.float32(self._maps / self._count)}  # type: ignore[dict-item]

    def lists(self) -> dict[str, Any]:
        """Sinks other than the first token, and massive activations."""
        return {"sinks": sink_tokens(self._sinks), "massive": massive_activations(self._massive)}
