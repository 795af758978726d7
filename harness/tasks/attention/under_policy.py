"""Shows a watcher the attention that a decoder really computes under a policy, and notes who was evicted when.

The policy is wrapped in one with a further statistic, which looks and changes nothing. It is no pure function, so it has no
place among `policies/`; and it makes the engine walk every token in plain PyTorch.

Axis letters: L layers, B samples, H KV heads, h of them in a view, G query heads of a KV head, Q = H * G, T tokens, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.engine.watch import Chunk, Watcher
from kvbench.policies import Attention, CacheView, Statistic
from kvbench.policies.policy import Composed


class Recorder:
    """Turns steps, which attend over slots, into chunks over positions."""

    def __init__(self, shapes: Sequence[LayerShape], streams: int, tokens: int, device: torch.device) -> None:
        """Begin with empty samples.

        Args:
            shapes: of the layers.
            streams: B.
            tokens: T.
            device: of the model.
        """
        self._shapes, self._tokens, self._device = shapes, tokens, device
        self.last_seen = torch.full((len(shapes), streams, shapes[0].heads, tokens), -1, device=device)  # [L, B, H, T]
        self._first = self._stop = 0
        self._rows: dict[str, list[Tensor]] = {}  # by layer, [B, H, G, t, T]

    def begin(self, first: int, stop: int) -> None:
        """Expect the steps from `first` to `stop` - 1."""
        self._first, self._stop, streams = first, stop, self.last_seen.shape[1]

        def empty(shape: LayerShape, value: float) -> Tensor:
            return torch.full((streams, shape.heads, shape.group, stop - first, stop), value, device=self._device)

        self._rows = {"weights": [empty(s, 0.0) for s in self._shapes], "logits": [empty(s, -torch.inf) for s in self._shapes]}

    def note(self, attention: Attention, view: CacheView) -> None:
        """Enter one step of the layers and heads that the view shows."""
        layers, streams = view.layer.flatten().tolist(), self.last_seen.shape[1]
        heads = view.head.flatten().tolist()[: view.position.shape[1]]
        for start in range(0, view.position.shape[0], streams):
            layer, at = layers[start if len(layers) > 1 else 0], slice(start, start + streams)
            step = int(view.step.flatten()[start if view.step.shape[0] > 1 else 0])
            valid, position = view.valid[at], view.position[at]  # [B, h, S]
            spare = torch.where(valid, position, self._stop)  # empty slots go to a column that is cut off
            for name, seen, blank in (("weights", attention.weights, 0.0), ("logits", attention.logits, -torch.inf)):
                part = seen[at].float()  # [B, h, G, S]
                row = torch.full((*part.shape[:3], self._stop + 1), blank, device=part.device)
                row.scatter_(-1, spare[:, :, None].expand_as(part), part)
                self._rows[name][layer][:, heads, :, step - self._first] = row[..., :-1]
            held = torch.zeros(*position.shape[:2], self._stop + 1, dtype=torch.bool, device=position.device)
            held.scatter_(-1, spare, True)
            seen_now = torch.where(held[..., : self._stop], step, self.last_seen[layer][:, heads, : self._stop])
            self.last_seen[layer, :, heads, : self._stop] = seen_now

    def show(self, watcher: Watcher) -> None:
        """Show the steps since `begin`, layer by layer."""
        for layer in range(len(self._shapes)):
            weights, logits = (self._rows[name][layer].flatten(1, 2) for name in ("weights", "logits"))
            rest = None if self._shapes[layer].plain else (1 - weights.sum(-1)).clamp(min=0)
            watcher.see_chunk(Chunk(layer, self._first, True, logits, weights, rest))
        self._rows = {}


@dataclass(frozen=True)
class _Look(Statistic):
    """Tells the recorder of every step, and keeps a 0."""

    sees = ("weights", "logits")
    per = "head"
    lasts = True

    recorder: Recorder = field(compare=False)

    @property
    def last(self) -> int | None:
        """All steps of a prompt, too."""
        return None

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Unchanged. [B, H]."""
        self.recorder.note(attention, view)
        return state


@dataclass(frozen=True)
class _Recorded(Composed):
    """A policy that keeps what the one inside keeps, while a recorder looks."""

    recorder: Recorder = field(compare=False, kw_only=True)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Those of the policy inside, and the look."""
        return (*self.score.statistics, _Look(self.recorder))

    def band(self, capacity: int) -> None:
        """None: what is computed in closed form can't be looked at."""


def recorded(config: CacheConfig, recorder: Recorder) -> CacheConfig:
    """The configuration with its policy looked at."""
    return replace(config, policy=_Recorded(config.policy, recorder=recorder))
