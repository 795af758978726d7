"""Records the attention that the decode loop computes under a policy, and when each token was evicted.

The policy is wrapped in one with a further statistic, which looks and changes nothing. It is no pure function, so it has no place
among `policies/`; and it makes the engine walk every token in plain PyTorch.

Axis letters: L layers, B samples, H KV heads, h of them in a view, G query heads of a KV head, Q = H * G, T tokens, S slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.engine.watch import Chunk, Watcher
from kvbench.policies import Attention, CacheView, Statistic
from kvbench.policies.policy import Composed

_MOST_STEPS, _MAX_NUMBERS = 64, 2**25  # of a block: kept until they are shown


class _Recorder:
    """Turns steps over slots into chunks over positions, and shows them to a watcher after every block."""

    def __init__(self, shapes: Sequence[LayerShape], ids: Tensor, watcher: Watcher, sunk: Collection[int]) -> None:
        """Begin with empty samples, [B, T]. `sunk` are the layers in which some weight goes to no token."""
        self._shapes, self._watcher, self._sunk = shapes, watcher, sunk
        streams, self._tokens = ids.shape
        queries = sum(s.heads * s.group for s in shapes)
        self.steps = max(1, min(_MOST_STEPS, _MAX_NUMBERS // (streams * queries * self._tokens)))  # of a block, at most
        self.last_seen = [torch.full((streams, s.heads, self._tokens), -1, device=ids.device) for s in shapes]  # [B, H, T] each
        self._first = 0  # step of the block
        self._count = 0  # its steps so far
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # weights and logits by layer, [B, H, G, t, L]

    def note(self, attention: Attention, view: CacheView) -> None:
        """Enter one step of the layers and heads in a view; several layers may be stacked in it."""
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
        for layer, rows in sorted(self._rows.items()):
            weights, logits = (x[:, :, :, : self._count, :stop].flatten(1, 2) for x in rows)
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
    recorder = _Recorder(model.layers, ids, watcher, sunk)
    decoder = CachedDecoder(model, replace(config, policy=_RecordedPolicy(config.policy, recorder=recorder)), len(ids))
    decoder.around_bookkeeping = recorder.shown
    if prompt:
        decoder.read_prompt(ids[:, :prompt], recorder.steps)
    for part in ids[:, prompt:].split(recorder.steps, 1):
        decoder(part, keep=torch.zeros(1, dtype=torch.int64, device=ids.device))
    return decoder, recorder.last_seen
