"""The decode loop: blocks of T >= 1 tokens through a model whose every layer keeps what its policy says.

T = 1 is a decode step; T = hundreds is how a book is scored; it is one code. No policy name, no metric and
no clock in here. Axis letters: B streams, T tokens, V vocabulary, H KV heads, G query heads of a KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.captured import StepGraphs
from kvbench.harness.engine.decoder import CacheConfig, Decoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.harness.engine.rotary import LONGEST_STREAM
from kvbench.harness.engine.slots import Slots
from kvbench.harness.engine.walk import Block, Walk


def decoder(
    model: Model, config: CacheConfig, streams: int = 1, *, walk: bool = False, closed: bool = True, compiled: bool = False
) -> Decoder:
    """A fresh decoder.

    Args:
        model: to drive.
        config: what to keep.
        streams: B.
        walk: token by token inside the layers even where a block can't evict anything.
        closed: compute blocks in closed form where the policy allows it.
        compiled: walk blocks by a compiled loop where there is one for the policy and device.

    Raises:
        ValueError: the policy can't serve this capacity.
    """
    if not config.policy.caches:
        return RecomputeDecoder(model, config, streams)
    return CachedDecoder(model, config, streams, walk=walk, closed=closed, compiled=compiled)


class CachedDecoder:
    """A decoder that keeps K and V in slots."""

    def __init__(
        self,
        model: Model,
        config: CacheConfig,
        streams: int = 1,
        *,
        walk: bool = False,
        closed: bool = True,
        compiled: bool = False,
        room: int | None = None,
    ) -> None:
        """As `decoder`; `room`: tokens held before anything is evicted, where that is not the capacity."""
        limit = config.limit if config.limit is not None else model.training_length
        if config.positions == "clamped" and limit is None:
            raise ValueError("positions 'clamped' need a limit: the model's config states no training length")
        self.model, self.config = model, config
        self.walks: list[Walk] = []
        for shape in dict.fromkeys(model.layers):
            layers = [index for index, other in enumerate(model.layers) if other == shape]
            slots = Slots(
                shape, layers, len(model.layers), config.policy, config.capacity, streams, config.seed,
                model.device, model.dtype, room,
            )  # fmt: skip
            self.walks.append(Walk(slots, config.positions, limit or 0, always=walk, closed=closed, compiled=compiled))
        self._step = torch.zeros(streams, 1, dtype=torch.int64, device=model.device)  # tokens taken in, per stream
        self._seen: int | None = 0  # the same, as far as the host knows: None once streams differ
        self._most = 0  # a bound of it for every stream
        self.graphs = StepGraphs() if compiled and not walk and model.device.type == "cuda" else None
        self._route()

    def _route(self) -> None:
        """Which walk answers which layer."""
        self._of_layer = {layer: walk for walk in self.walks for layer in walk.slots.layers}

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """See `Decoder`."""
        count = tokens.shape[1]
        if valid is not None:
            self._seen = None
        self._most += count
        if self._most > LONGEST_STREAM:
            raise ValueError(f"a stream of more than {LONGEST_STREAM} tokens")
        for walk in self.walks:
            walk.slots.grow(self._most)
        if self.graphs is None or count > 1 or self._seen is None or keep is not None:
            logits = self._taken_in(tokens, valid, keep)
        else:
            logits = self._captured(tokens, self.graphs)
        if self._seen is not None:
            self._seen += count
        return logits

    def taken_in(self, count: int) -> None:
        """Note that so many tokens are behind every stream, whose K and V were put into the slots."""
        self._step += count
        self._seen, self._most = count, count

    def _taken_in(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """A block, eagerly."""
        count = tokens.shape[1]
        if count == 1:
            steps = self._step.clone()
        else:
            steps = self._step + (torch.arange(count, device=tokens.device) if valid is None else valid.cumsum(1) - valid.long())
        self._block = Block(steps, valid, self._seen)
        for walk in self.walks:
            walk.begin(self._block)
        logits = self.model(tokens, self, 0 if keep is None else keep)
        for walk in self.walks:
            walk.end(self._block)
        self._step += count if valid is None else valid.sum(1, keepdim=True)
        return logits

    def _captured(self, tokens: Tensor, graphs: StepGraphs) -> Tensor:
        """A token, by a captured step where there is one."""
        assert self._seen is not None
        state = tuple(walk.host_state(self._seen) for walk in self.walks)
        logits, replayed = graphs(state, [dict(walk.slots.windows) for walk in self.walks], self._taken_in, tokens)
        for walk in self.walks if replayed else []:
            walk.replayed(self._seen)
        return logits

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Answer one layer's attention from its cache."""
        return self._of_layer[layer].attend(layer, query, keys, values, terms, self._block)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V slots of all layers."""
        return sum(walk.slots.kv_bytes for walk in self.walks)

    @property
    def state_bytes(self) -> int:
        """Bytes of ranks, positions and statistics of all layers."""
        return sum(walk.slots.state_bytes for walk in self.walks)

    def kept(self) -> list[list[list[list[int]]]]:
        """Positions held, oldest first, per layer, stream and KV head. Syncs with the host."""
        return [self._of_layer[layer].slots.kept(layer) for layer in range(len(self.model.layers))]

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        """See `Decoder`."""
        for walk in self.walks:
            walk.slots.grow(self._most + tokens)

    def held(self, positions: Sequence[int]) -> float:
        """See `Decoder`."""
        wanted = torch.tensor(positions, device=self.model.device)
        found = [walk.slots.held(wanted) for walk in self.walks]
        return float(torch.cat([x.flatten() for x in found]).float().mean())

    @property
    def slots(self) -> tuple[float, float]:
        """See `Decoder`."""
        parts = [(len(w.slots.layers), *w.slots.looked_at(self._most)) for w in self.walks]
        layers = sum(n for n, _, _ in parts)
        return sum(n * used for n, used, _ in parts) / layers, sum(n * attended for n, _, attended in parts) / layers

    @torch.inference_mode()
    def fork(self, streams: Sequence[int]) -> Self:
        """A decoder whose streams are copies of these: slots, ranks and statistics, nothing shared."""
        index = torch.tensor(streams, device=self.model.device)
        other = copy(self)
        other.walks = [walk.fork(index) for walk in self.walks]
        other._route()
        other._step = self._step[index]
        other.graphs = StepGraphs() if self.graphs is not None else None
        return other
