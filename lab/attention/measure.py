"""Loads a model to watch, and watches it read samples of a text, or images, under full attention or a policy.

Models that are only watched may be vision transformers, encoders, and others that the decode loop can't drive.
Under a policy, a watcher is shown the attention that the decoder really computes, and is told who was evicted when.

Axis letters: L layers, H KV heads, D key dim.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForCausalLM

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.watch import NotWatchableError, check, watch
from kvbench.harness.models.config import read_config
from kvbench.harness.models.load import load_model, random_model, refuse_unless_finite, torch_dtype
from kvbench.harness.models.weights import read_weights
from kvbench.harness.tasks.attention import watch_samples as harness
from kvbench.harness.tasks.attention.watch_samples import batches, onto, refuse_clamped
from kvbench.harness.tasks.common.samples import Samples
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.lab.attention.figures import figures, massive_activations, sink_tokens
from kvbench.lab.attention.notes import Lost, Notes
from kvbench.lab.attention.recorder import read_recorded
from kvbench.lab.attention.schema import MOST_SHOWN, AttentionMetrics, AttentionOptions
from kvbench.lab.attention.vision import ImageSamples, read_vision_weights, saved_class, vision_config


def load_watched(
    directory: Path,
    dtype: str,
    device: torch.device,
    rope_length: int | None = None,
    allow_pickle: bool = False,
    *,
    random: bool = False,
    devices: int = 1,
) -> Model:
    """Load a model as `load_model` does or, if that can't, so that it can be watched; it has no layers then.

    Raises:
        UserError: its files are damaged or don't match its config, or its outputs are not finite.
        MemoryError: random weights don't fit.
    """
    config, kind = read_config(directory), torch_dtype(dtype)
    tower, saved = vision_config(config), saved_class(config)
    if tower is not None:
        vision = (
            random_model(tower, kind, device, AutoModel) if random else read_vision_weights(directory, config, kind, allow_pickle)
        )
        return Model(vision.eval().to(device).requires_grad_(False))  # type: ignore[arg-type]
    if saved is AutoModelForCausalLM or saved.can_generate():
        with suppress(UserError):  # if its files are damaged, reading them again says so
            return load_model(directory, dtype, device, rope_length, allow_pickle, random=random, devices=devices)
    if random:
        hf = random_model(config, kind, device, AutoModelForCausalLM)
    else:
        hf = read_weights(directory, config, kind, allow_pickle, saved, head=False)
    hf = hf.eval().to(device)  # type: ignore[arg-type]
    refuse_unless_finite(hf, directory.stem if random else directory.name, dtype)
    return Model(hf.requires_grad_(False))


def measure(options: AttentionOptions, job: Job) -> AttentionMetrics:
    """Look at every sample; the trace gets what was noted of each.

    Raises:
        MeasurementError: the model's attention can't be shown, or the policy keeps no cache.
    """
    policy = job.config.policy
    if isinstance(policy, Contestant):
        raise MeasurementError("what somebody else's cache keeps can't be seen: this task is for policies in our own loop")
    if not policy.caches:
        raise MeasurementError("it keeps no cache, so nothing is evicted, and its attention is that of many short texts")
    if not policy.evicts:
        refuse_clamped(job)
    album, sizes = Album(job.data), dict[str, int]()
    try:
        sunk = check(job.model.hf, **onto(job.model, job.data.checked()))
        for start, stop, inputs in batches(job, options.samples):
            notes, lost = Notes(job.data.length, options.map_tokens), None
            if policy.evicts:
                prompt = options.prompt or 0
                decoder, last_seen = read_recorded(job.model, job.config, inputs["input_ids"], prompt, notes, sunk)
                sizes = _sizes(decoder)
                lost = Lost(job.data.length, last_seen)
                watch(job.model.hf, lost, **inputs)
            else:
                watch(job.model.hf, notes, **inputs)
            album.note(start, notes, lost, options.epsilon)
            job.progress(job.data.tokens * stop // options.samples, f"first token {album.mean('first'):.3f}")
    except NotWatchableError as error:
        raise MeasurementError(str(error)) from None
    album.save(job.trace)
    return AttentionMetrics.from_json({**figures(album.noted(), options.epsilon, options.norm_cutoff), **album.lists(), **sizes})


def _sizes(decoder: CachedDecoder) -> dict[str, int]:
    """Bytes of one sample's cache, unless they depend on the sample."""
    if decoder.config.capacity is None:
        return {}
    return {"kv_bytes": decoder.kv_bytes // decoder.streams, "kv_held_bytes": decoder.held_bytes // decoder.streams}


class Album(harness.Album):
    """The notes of all samples."""

    def __init__(self, samples: Samples | ImageSamples) -> None:
        super().__init__(samples.length)
        self._samples = samples
        self._queries: NDArray[Any] | None = None
        self._energies: dict[str, NDArray[np.float64]] = {}  # of keys and values, summed over samples. [L, H, D] each
        self._sinks: list[tuple[str, int, float]] = []
        self._massive: list[tuple[int, int, str, int, float]] = []

    def note(self, start: int, notes: Notes, lost: Lost | None, epsilon: float) -> None:
        """Add the samples from number `start` on."""
        more = notes.by_token() if isinstance(self._samples, ImageSamples) else {}
        if lost is not None:
            more, self._queries = more | {"lost": lost.of_samples()}, lost.queries
        self.add(notes, **more)
        self._energies = {name: self._energies.get(name, 0) + x for name, x in notes.energies().items()}
        text = self._samples.text
        self._sinks += [(text(start + s, p)[:MOST_SHOWN], p, share) for s, p, share in notes.other_sinks(epsilon)]
        self._massive += [(layer, dim, text(start + s, p)[:MOST_SHOWN], p, size) for layer, s, p, dim, size in notes.massive]

    def noted(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that `figures` takes, by name."""
        noted = super().noted() | self._energies
        if isinstance(self._samples, ImageSamples):
            layout = self._samples.layout
            noted["grid"] = np.array([layout.rows, layout.columns, layout.special, layout.registers])
        if self._queries is not None:
            noted["queries"] = self._queries
        return noted

    def lists(self) -> dict[str, Any]:
        """Sinks other than the first token, and massive activations."""
        return {"sinks": sink_tokens(self._sinks), "massive": massive_activations(self._massive)}
