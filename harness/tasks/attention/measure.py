"""Watches a model read samples of a text, or images, under full attention or a policy.

Under a policy, a watcher is shown the attention that the decoder really computes, and is told who was evicted when. The policy is
wrapped in one with a further statistic, which looks and changes nothing. It is no pure function, so it has no place among
`policies/`; and it makes the engine walk every token in plain PyTorch.

Axis letters: L layers, B samples, H KV heads, h of them in a view, G query heads of a KV head, Q = H * G, T tokens, S slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.errors import UserError
from kvbench.harness.data.images import Images, in_directory, on_hub, shapes
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.probes import LayerCache
from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.engine.watch import Chunk, NotWatchableError, Watcher, check, watch
from kvbench.harness.models.vision import ImageReader, TokenLayout
from kvbench.harness.tasks.attention.figures import figures, massive_activations, sink_tokens
from kvbench.harness.tasks.attention.notes import Lost, Notes
from kvbench.harness.tasks.attention.schema import MOST_SHOWN, AttentionMetrics, AttentionOptions
from kvbench.harness.tasks.common.samples import Samples
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.policies import Attention, CacheView, Statistic
from kvbench.policies.policy import Composed

_MOST_STEPS, _MAX_NUMBERS = 64, 2**25  # of a block: kept until they are shown


@dataclass(frozen=True)
class ImageSamples:
    """Images, each of which is a sample."""

    images: Images
    reader: ImageReader  # turns them into pixels
    count: int  # of the samples
    layout: TokenLayout  # of the tokens that the model makes of an image

    @cached_property
    def ids_sha256(self) -> str:
        """Fingerprint of what the model reads: the pixels, as its image processor makes them."""
        digest = hashlib.sha256()
        for number in range(self.count):
            digest.update(self.inputs(number, number + 1)["pixel_values"].numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.layout.tokens

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return self.count * self.length

    def facts(self) -> dict[str, Any]:
        """Facts about the data, for the record."""
        return {"source": self.images.source, "ids_sha256": self.ids_sha256, "tokens": self.tokens}

    def inputs(self, start: int, stop: int) -> dict[str, Tensor]:
        """Model inputs: `pixel_values` of the samples from `start` to `stop` - 1. [B, 3, H, W] float32."""
        return {"pixel_values": self.reader.pixels([self.images.load(number) for number in range(start, stop)])}

    def checked(self) -> dict[str, Tensor]:
        """The sample that the model's attention is checked with."""
        return self.inputs(0, 1)

    def text(self, sample: int, position: int) -> str:
        """Name of the token at a position, such as "[CLS]", "[register 1]" or "patch"."""
        return self.layout.name(position)


def image_samples(options: AttentionOptions, reader: Callable[[], ImageReader], directory: Path | None) -> ImageSamples:
    """The first images of the data.

    Raises:
        UserError: the model reads no images, or there are too few.
    """
    loaded, images = reader(), _images(options, directory)
    if images.count is not None and images.count < options.samples:
        raise UserError(f"{images.source}: has {images.count:,} images, not the {options.samples:,} asked for; set samples lower")
    return ImageSamples(images, loaded, options.samples, loaded.layout(loaded.pixels([images.load(0)])))


def _images(options: AttentionOptions, directory: Path | None) -> Images:
    if options.data == "shapes":
        return shapes(options.data_seed or 0)
    if directory is not None:
        return in_directory(directory)
    if options.dataset is None:
        raise UserError(
            "data images: give a directory of .png or .jpg files (--data DIR), or a hub dataset (dataset: owner/name)"
        )
    return on_hub(options.dataset, options.split, options.samples)


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
        """Return the arrays that `figures` takes, by name; N samples along the first axis of most."""
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


class _Recorder:
    """Turns steps over slots into chunks over positions, and shows them to a watcher after every block."""

    def __init__(
        self, shapes: Sequence[LayerShape], readers: Sequence[LayerCache], ids: Tensor, watcher: Watcher, sunk: Collection[int]
    ) -> None:
        """Begin with empty samples, [B, T].

        `readers` has, for each layer, the cache that it reads. `sunk` are the layers in which some weight goes to no token.
        """
        self._shapes, self._readers, self._watcher, self._sunk = shapes, readers, watcher, sunk
        streams, self._tokens = ids.shape
        queries = sum(s.heads * s.group for s in shapes)
        most = _MOST_STEPS if len(readers) == len(shapes) else 1  # where layers share K and V, tokens are read one by one
        self.steps = max(1, min(most, _MAX_NUMBERS // (streams * queries * self._tokens)))  # of a block, at most
        self.last_seen = [torch.full((streams, s.heads, self._tokens), -1, device=ids.device) for s in shapes]  # [B, H, T] each
        self._first = 0  # step of the block
        self._count = 0  # its steps so far
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # weights and logits by cache, [B, H, G, t, L]

    def note(self, attention: Attention, view: CacheView) -> None:
        """Enter one step of the caches and heads in a view; several caches may be stacked in it."""
        layers, of_head, streams = view.layer.flatten().tolist(), view.head[..., 0].tolist(), len(self.last_seen[0])
        for start in range(0, len(view.position), streams):
            layer, heads = (x[start if len(x) > 1 else 0] for x in (layers, of_head))
            part, step = slice(start, start + streams), int(view.step.flatten()[start if len(view.step) > 1 else 0])
            self._enter(
                layer, heads, step, view.position[part], view.valid[part], attention.weights[part], attention.logits[part]
            )

    def _enter(
        self, layer: int, heads: list[int], step: int, position: Tensor, valid: Tensor, weights: Tensor, logits: Tensor
    ) -> None:
        """Enter one step of some heads of a layer. position, valid: [B, h, S]; weights, logits: [B, h, G, S]."""
        row_number, stop = step - self._first, min(self._tokens, self._first + self.steps)
        if layer not in self._rows:
            shape = len(position), self._shapes[layer].heads, self._shapes[layer].group, stop - self._first, stop
            blank = (torch.full(shape, x, dtype=weights.dtype, device=weights.device) for x in (0.0, -torch.inf))
            self._rows[layer] = next(blank), next(blank)
        place = torch.where(valid, position, stop)  # empty slots go to a column that is cut off
        for into, scores, empty in zip(self._rows[layer], (weights, logits), (0.0, -torch.inf), strict=True):
            row = torch.full((*scores.shape[:3], stop + 1), empty, dtype=into.dtype, device=scores.device)
            into[:, heads, :, row_number] = row.scatter_(-1, place[:, :, None].expand_as(scores), scores.to(into.dtype))[..., :-1]
        held = torch.zeros(*position.shape[:2], stop + 1, dtype=torch.bool, device=position.device).scatter_(-1, place, True)
        last = self.last_seen[layer]
        last[:, heads, :stop] = torch.where(held[..., :-1], step, last[:, heads, :stop])
        self._count = max(self._count, row_number + 1)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the steps of a block to the watcher, layer by layer, when the wrapped code has ended it."""
        yield
        stop = self._first + self._count
        for layer, (cache, place) in enumerate(self._readers):
            group = self._shapes[cache].group_of_reader
            of_layer = slice(place * group, (place + 1) * group)
            weights, logits = (x[:, :, of_layer, : self._count, :stop].flatten(1, 2) for x in self._rows[cache])
            rest = (1 - weights.sum(-1)).clamp(min=0) if layer in self._sunk else None
            self._watcher.see_chunk(Chunk(layer, self._first, True, logits, weights, rest))
        self._first, self._count, self._rows = stop, 0, {}


@dataclass(frozen=True)
class _RecordingStatistic(Statistic):
    """A statistic that passes every step to a recorder. Its own state stays 0."""

    sees = ("weights", "logits")
    per = "head"
    lasts = True

    recorder: _Recorder = field(compare=False)

    @property
    def last(self) -> int | None:
        """None: it sees every step of a prompt, too."""
        return None

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """The state, unchanged. [B, H]."""
        self.recorder.note(attention, view)
        return state


@dataclass(frozen=True)
class _RecordedPolicy(Composed):
    """A policy whose steps are recorded. It keeps what the policy inside keeps."""

    recorder: _Recorder = field(compare=False, kw_only=True)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of the policy inside, and the recording one."""
        return (*self.score.statistics, _RecordingStatistic(self.recorder))

    @property
    def outcome(self) -> bool:  # type: ignore[override]  # of the class elsewhere
        """Whether the budgets of the policy inside follow from the prompt."""
        return self.score.outcome

    def band(self, capacity: int) -> None:
        """None: attention that is computed in closed form can't be recorded."""


def read_recorded(
    model: Model, config: CacheConfig, ids: Tensor, prompt: int, watcher: Watcher, sunk: Collection[int]
) -> tuple[CachedDecoder, list[Tensor]]:
    """Read samples, [B, T] int64, under a policy, and show every step's attention to the watcher.

    The first `prompt` tokens are the prompt. `sunk` are the layers in which some weight goes to no token.

    Returns the decoder, and the last query that saw each token, by layer; -1 for none. [B, H, T] int64 each.
    """
    recorder = _Recorder(model.layers, model.readers, ids, watcher, sunk)
    decoder = CachedDecoder(model, replace(config, policy=_RecordedPolicy(config.policy, recorder=recorder)), len(ids))
    decoder.around_bookkeeping = recorder.shown
    if prompt:
        decoder.read_prompt(ids[:, :prompt], recorder.steps)
    for part in ids[:, prompt:].split(recorder.steps, 1):
        decoder(part, keep=torch.zeros(1, dtype=torch.int64, device=ids.device))
    return decoder, [recorder.last_seen[reader.cache] for reader in model.readers]
