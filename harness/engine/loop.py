"""The decode loop: blocks of T >= 1 tokens through a model whose every layer keeps what its policy says.

T = 1 is a decode step; T = hundreds is how a book is scored; it is one code. No policy name, no metric and
no clock in here. Axis letters: B streams, T tokens, V vocabulary, H KV heads, G query heads of a KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from harness.engine.attention import Terms, causal
from harness.engine.captured import StepGraphs
from harness.engine.model import Model
from harness.engine.rotary import LONGEST_STREAM, rotate
from harness.engine.slots import Slots
from harness.engine.walk import Block, Walk
from policies import Policy, PositionMode

_PREFILL = 8192  # tokens that recompute-window runs at once


@dataclass(frozen=True)
class CacheConfig:
    """What a decoder is asked to keep.

    Attributes:
        policy: unbound.
        capacity: tokens per KV head kept between steps; None for a policy that never evicts.
        positions: where RoPE puts a cached token.
        limit: largest distance of mode `clamped`, in tokens; the model's training length when None.
        seed: of the policy's randomness.
    """

    policy: Policy
    capacity: int | None = None
    positions: PositionMode = "cache"
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.capacity is None) == self.policy.evicts:
            name = type(self.policy).__name__
            raise ValueError(f"{name} needs a capacity" if self.policy.evicts else f"{name} takes no capacity")


class Decoder(Protocol):
    """Reads B streams, a block of tokens at a time."""

    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Take a block in.

        Args:
            tokens: [B, T] int64.
            valid: which of them count; all when None. An invalid token changes nothing and its logits mean
                nothing. [B, T] bool.
            keep: indices of the tokens whose logits are wanted; all when None. [K] int64.

        Returns:
            Logits for the token after each. [B, T or K, V], the model's dtype.
        """

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens now, so that no step has to."""

    def fork(self, streams: Sequence[int]) -> Decoder:
        """A decoder whose streams are copies of these, nothing shared."""

    def held(self, positions: Sequence[int]) -> float:
        """Share of (layer, KV head, token) still held, of these tokens of the first stream. Syncs with the host."""

    @property
    def slots(self) -> tuple[float, float]:
        """Slots that hold a token, and slots a decode step's attention runs over; means over layers, per KV head."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V held between steps."""

    @property
    def state_bytes(self) -> int:
        """Bytes of everything else held between steps."""


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


class RecomputeDecoder:
    """A decoder that keeps no cache: every token's window is run afresh, many windows at once."""

    def __init__(self, model: Model, config: CacheConfig, streams: int = 1) -> None:
        """As `decoder`."""
        assert config.capacity is not None
        self.model, self.config = model, config
        band = config.policy.bind(config.capacity).band(config.capacity)
        self.sinks = 0 if band is None else band[0]  # tokens of the stream's beginning that open every window
        self.length = config.capacity + 1
        self._history = [torch.zeros(0, dtype=torch.int64, device=model.device) for _ in range(streams)]
        self._alike = True  # streams have the same length, so that their windows are run together
        self._seen = 0  # tokens taken in by the first stream

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """See `Decoder`. Only what is kept is computed."""
        wanted = range(tokens.shape[1]) if keep is None else keep.tolist()
        self._alike = self._alike and valid is None
        streams, rows = len(tokens), []
        for part in [slice(0, streams)] if self._alike else [slice(b, b + 1) for b in range(streams)]:
            new, counts = tokens[part], list(range(1, tokens.shape[1] + 1))  # tokens that count, up to and with each
            if valid is not None:
                new, counts = tokens[part.start, valid[part.start]][None], valid[part.start].cumsum(0).tolist()
            before = torch.stack(self._history[part])
            text = torch.cat([before, new], 1)
            rows.append(self._logits(text, [max(1, before.shape[1] + counts[t]) for t in wanted]))
            self._history[part] = text if text.shape[1] < self.length else self._window(text, self.length - 1)
            self._seen += counts[-1] if part.start == 0 else 0
        return torch.cat(rows)

    def _window(self, text: Tensor, length: int) -> Tensor:
        """The sinks and the newest tokens of each stream, as many as that. [B, N] -> [B, length]."""
        return torch.cat([text[:, : self.sinks], text[:, text.shape[1] - length + self.sinks :]], 1)

    def _logits(self, text: Tensor, ends: list[int]) -> Tensor:
        """Logits after the windows of each stream that end before these places, ascending. [B, N] -> [B, K, V]."""
        short = [e for e in ends if e < self.length]  # the first windows begin with the stream and share one run
        full = [e - self.length for e in ends[len(short) :]]
        out = []
        if short or not ends:
            last = short[-1] if short else 1
            kept = len(short) if _in_a_row(short) and short else torch.tensor([e - 1 for e in short], device=text.device).long()
            out.append(self.model(text[:, :last], self, kept))
        windows = text[:, self.sinks :].unfold(1, self.length - self.sinks, 1) if full else text
        opening = text[:, None, : self.sinks]
        at_once = max(1, _PREFILL // (self.length * len(text)))
        for starts in [full[i : i + at_once] for i in range(0, len(full), at_once)]:
            chosen = windows[:, starts[0] : starts[-1] + 1] if _in_a_row(starts) else windows[:, starts]
            chosen = torch.cat([opening.expand(-1, len(starts), -1), chosen], 2)
            out.append(self.model(chosen.flatten(0, 1), self, 1).view(len(text), len(starts), -1))
        return torch.cat(out, 1)

    def reserve(self, tokens: int) -> None:
        """See `Decoder`: there is nothing to make room in."""

    def held(self, positions: Sequence[int]) -> float:
        """See `Decoder`: what the window of the next token has."""
        first = self._seen - self.length + self.sinks  # the last that the window has no more
        return sum(p < self._seen and (p < self.sinks or p > first) for p in positions) / len(positions)

    @property
    def slots(self) -> tuple[float, float]:
        """See `Decoder`: the tokens of the window."""
        return (float(min(self._seen, self.length)),) * 2

    def fork(self, streams: Sequence[int]) -> Self:
        """See `Decoder`."""
        other = copy(self)
        other._history = [self._history[b] for b in streams]  # replaced at every block, never written to
        return other

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Plain causal attention of the windows themselves."""
        shape = self.model.layers[layer]
        if shape.rotation is not None:
            query, keys = shape.rotation.pair(query), shape.rotation.pair(keys)
            at = torch.arange(keys.shape[2], device=keys.device)
            turns = shape.rotation.turns(at, keys.dtype, self.length + 1)
            query, keys = rotate(query, turns), rotate(keys, turns)
        return causal(query.unflatten(1, (shape.heads, -1)), keys, values, terms).flatten(1, 2)

    @property
    def kv_bytes(self) -> int:
        """Nothing is held between steps."""
        return 0

    @property
    def state_bytes(self) -> int:
        """The tokens of the window."""
        return sum(text.nbytes for text in self._history)


def _in_a_row(places: list[int]) -> bool:
    """Whether they follow each other without a gap: then a slice takes them, and nothing waits for an index."""
    return not places or places[-1] - places[0] == len(places) - 1
