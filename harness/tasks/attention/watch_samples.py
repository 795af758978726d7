"""Recording of a model's attention while it reads samples: sums over queries, never the whole attention matrix of a sample.

Axis letters: N samples, of which B are read side by side, L layers, Q query heads, T tokens, t queries of a chunk, M tokens of a
map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbench.harness.engine.model import Model
from kvbench.harness.engine.watch import Chunk, NotWatchableError, Watcher, check, watch
from kvbench.harness.tasks.attention.attention_options import AttentionMetrics, AttentionOptions, figures
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.policies.dense import Dense


class Notes(Watcher):
    """Watcher of a model that takes notes of samples read side by side."""

    def __init__(self, tokens: int, map_tokens: int) -> None:
        """Start empty notes.

        Args:
            tokens: T.
            map_tokens: M; limited to T.
        """
        self._tokens, self._map = tokens, min(map_tokens, tokens)
        self._received: list[Tensor] = []  # sums over queries, per layer. [B, Q, T] float64
        self._causal: list[bool] = []
        self._late: list[Tensor] = []  # [B, Q]
        self._entropy: list[Tensor] = []  # [B, Q]
        self._largest: list[Tensor] = []  # [B, Q]
        self._rest: list[Tensor] = []  # [B, Q]
        self._sunk = False  # whether some layer has attention that goes to no token
        self._maps: list[Tensor] = []  # [Q, M, M]

    def see_chunk(self, chunk: Chunk) -> None:
        """Add the weights, entropies and logits of a chunk's queries to the sums."""
        weights, logits, layer, keys = chunk.weights, chunk.logits, chunk.layer, chunk.weights.shape[-1]
        if layer == len(self._received):
            shape, device = weights.shape[:2], weights.device
            self._received.append(torch.zeros(*shape, self._tokens, dtype=torch.float64, device=device))
            self._entropy.append(torch.zeros(shape, dtype=torch.float64, device=device))
            self._rest.append(torch.zeros(shape, dtype=torch.float64, device=device))
            self._largest.append(torch.full(shape, -torch.inf, device=device))
            self._maps.append(torch.full((shape[1], self._map, self._map), torch.nan, device=device))
            self._late.append(torch.zeros(shape, device=device))
            self._causal.append(chunk.causal)
        self._received[layer][..., :keys] += weights.sum(2)
        entropy = torch.special.entr(weights).sum(-1)
        if chunk.rest is not None:
            entropy = entropy + torch.special.entr(chunk.rest)
            self._rest[layer] += chunk.rest.sum(-1)
            self._sunk = True
        self._entropy[layer] += entropy.sum(-1)
        self._largest[layer] = torch.maximum(self._largest[layer], logits.amax((2, 3)).float())
        if chunk.first < self._map:
            shown = logits[:, :, : self._map - chunk.first, : self._map].float().mean(0)
            self._maps[layer][:, chunk.first : chunk.first + shown.shape[1], : shown.shape[2]] = shown
        if chunk.first + weights.shape[2] == self._tokens:
            self._late[layer] = weights[:, :, -1, 0].float()

    def mean_received(self) -> Tensor:
        """Return the attention that each token receives. [L, B, Q, T].

        The mean is over the queries from the token on, or over all queries if attention is not causal.
        """
        received = torch.stack(self._received)
        queries = torch.full((self._tokens,), self._tokens, device=received.device)
        return received / (queries - torch.arange(self._tokens, device=received.device) if self._causal[0] else queries)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the notes by sample, in the form that `figures` takes. [B, L, Q] each."""
        arrays = {
            "first": self.mean_received()[..., 0].float(),
            "late": torch.stack(self._late),
            "largest_logit": torch.stack(self._largest),
            "entropy": torch.stack(self._entropy) / self._tokens,
        }
        if self._sunk:
            arrays["rest"] = torch.stack(self._rest) / self._tokens
        return by_sample(arrays)

    def logit_maps(self) -> NDArray[np.float32]:
        """Return the mean logits among the first tokens; NaN where a key is masked. [L, Q, M, M]."""
        maps = torch.stack(self._maps).float()
        return maps.masked_fill(torch.isneginf(maps), torch.nan).cpu().numpy()


def by_sample(arrays: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Convert tensors by layer to float32 arrays by sample. [L, B, ...] -> [B, L, ...]."""
    return {name: x.transpose(0, 1).float().cpu().numpy() for name, x in arrays.items()}


class Album:
    """Notes of all samples."""

    def __init__(self, tokens: int) -> None:
        """tokens: T."""
        self._tokens = tokens
        self._arrays: dict[str, list[NDArray[Any]]] = {}
        self._count = 0
        self._received: NDArray[np.float64] | float = 0.0  # summed over samples. [L, Q, T]
        self._maps: NDArray[np.float32] | float = 0.0  # summed over samples. [L, Q, M, M]

    def add(self, notes: Notes, **more: NDArray[Any]) -> None:
        """Add the notes of samples, and further arrays of the same samples, [B, ...] each."""
        arrays = notes.arrays() | more
        for name, x in arrays.items():
            self._arrays.setdefault(name, []).append(x)
        count = len(arrays["first"])
        self._count += count
        self._received = self._received + notes.mean_received().sum(1).cpu().numpy()
        self._maps = self._maps + count * notes.logit_maps()

    def mean(self, name: str) -> float:
        """Return the mean of a note over the samples so far."""
        return float(np.concatenate(self._arrays[name]).mean())

    def noted(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that `figures` takes, by name."""
        return {name: np.concatenate(x) for name, x in self._arrays.items()} | {"tokens": np.array(self._tokens)}

    def save(self, file: Path) -> None:
        """Write the trace: all notes, and means over samples of the attention that each token receives and of logit maps."""
        means = {"received": np.float32(self._received / self._count), "logits": np.float32(self._maps / self._count)}
        with file.open("wb") as trace:
            np.savez_compressed(trace, **self.noted(), **means)  # type: ignore[arg-type]


def batches(job: Job, samples: int) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Yield (start, stop, inputs) of samples that the model reads side by side."""
    at_once = max(1, job.block // job.data.length)
    for start in range(0, samples, at_once):
        stop = min(samples, start + at_once)
        yield start, stop, onto(job.model, job.data.inputs(start, stop))


def onto(model: Model, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs on the model's device. Floating-point inputs (pixels) are converted to the model's dtype."""
    return {name: x.to(model.device, model.dtype if x.is_floating_point() else None) for name, x in inputs.items()}


def refuse_clamped(job: Job) -> None:
    """Refuse full attention with clamped positions.

    Raises:
        MeasurementError: positions are clamped.
    """
    if job.config.positions == "clamped":
        raise MeasurementError("full attention is the model's own, which doesn't clamp positions: leave `positions` out")


def measure(options: AttentionOptions, job: Job) -> AttentionMetrics:
    """Record the full attention of every sample, and write the notes to the trace.

    Raises:
        MeasurementError: the model's attention can't be shown, or the policy is not `dense`.
    """
    if not isinstance(job.config.policy, Dense):
        raise MeasurementError("this task shows full attention: its policy must be dense")
    refuse_clamped(job)
    album = Album(job.data.length)
    try:
        check(job.model.hf, **onto(job.model, job.data.checked()))
        for _, stop, inputs in batches(job, options.samples):
            notes = Notes(job.data.length, options.map_tokens)
            watch(job.model.hf, notes, **inputs)
            album.add(notes)
            job.progress(job.data.tokens * stop // options.samples, f"first token {album.mean('first'):.3f}")
    except NotWatchableError as error:
        raise MeasurementError(str(error)) from None
    album.save(job.trace)
    return AttentionMetrics.from_json(figures(album.noted(), options.epsilon))
