"""Plain decoder for models whose layers read the K and V of another layer. It concatenates and slices its cache at every step.

Each layer that computes K and V has one cache, and all layers that read a cache see the same tokens. Their query heads form one
group for the policy. One token at a time passes through all layers; then statistics are updated and tokens are evicted. A cache
whose first reader comes before its writer *lags*: no token sees itself, and the first token of a stream sees nothing.

Axis letters: B streams, T tokens, V vocabulary, H KV heads, G query heads of a KV head in all layers that read it, g in one
layer, n cached tokens, D key dim, Dv value dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvbench.harness.engine.attention import Terms, forward, logits_of, weights
from kvbench.harness.engine.probes import layer_shapes, output_projections
from kvbench.harness.engine.rotary import LONGEST_STREAM, rotate
from kvbench.harness.engine.slots import LayerShape
from kvbench.lab.shared_kv.sources import kv_sources
from kvbench.policies import Attention, CacheView, Policy, PositionMode, Statistic, Written


@dataclass(frozen=True)
class Setting:
    """Configuration of a decoder.

    Attributes:
        policy: policy that is not yet bound to the capacity. After the cache is full, one token per KV head is evicted per step.
        capacity: tokens per KV head kept between steps; None for a policy that never evicts.
        positions: mode of the positions that RoPE gives to cached tokens.
        limit: largest distance in position mode `clamped`, in tokens.
        seed: seed of the policy's random numbers.
    """

    policy: Policy
    capacity: int | None = None
    positions: PositionMode = "stream"
    limit: int = 0
    seed: int = 0


class _Cache:
    """Tokens of one layer that computes K and V, oldest first.

    Attributes:
        keys: unrotated keys with paired dims. [B, H, n, D].
        values: values. [B, H, n, Dv].
        position: positions in the stream. [B, H, n] int64.
        states: tensor of each statistic. [B, H, n, *k] float32, or [B, H, *k] float64 for a statistic per head.
        lags: whether a layer that reads the cache comes before the layer that writes it.
    """

    def __init__(
        self,
        shape: LayerShape,
        setting: Setting,
        index: int,
        caches: int,
        lags: bool,
        output: Tensor | None,
        streams: int,
        dtype: torch.dtype,
    ) -> None:
        """Begin without tokens.

        Args:
            shape: shape of the writing layer, with the query heads of all readers.
            index: index of the cache among all `caches` of the model.
            output: output weights of all readers, in the form of `Written.output`.
            streams: B.
            dtype: dtype of K and V.
        """
        self._shape, self._setting, self._index, self._caches, self._output = shape, setting, index, caches, output
        self.lags = lags
        self._kept = shape.kept(setting.capacity)
        self._policy = setting.policy if setting.capacity is None else setting.policy.bind(self._kept or 0)
        size = streams, shape.heads, 0
        self.keys, self.values = (torch.empty(*size, dims, dtype=dtype) for dims in (shape.key_dim, shape.value_dim))
        self.position, self._state_dtype = torch.empty(size, dtype=torch.int64), torch.promote_types(dtype, torch.float32)
        self.states = {s: self._blank(s, 0 if s.per == "slot" else None) for s in self._policy.statistics}
        self._step, self._attention = 0, list[dict[str, Tensor]]()  # of each layer that has read the cache in this step

    def _blank(self, statistic: Statistic, tokens: int | None) -> Tensor:
        """First values of a statistic, of new tokens or of every head."""
        axes, dtype = ((), torch.float64) if tokens is None else ((tokens,), self._state_dtype)
        size = *self.position.shape[:2], *axes, *statistic.shape(self._shape.sizes)
        return self.position.new_full(size, statistic.initial, dtype=dtype)

    def begin(self, step: int) -> None:
        """Enter the token of a step in the account. Its K and V come when the writing layer does."""
        self._step, self._attention = step, []
        self.position = pad(self.position, (0, 1), value=step)
        for s, state in self.states.items():
            if s.per == "slot":
                self.states[s] = torch.cat([state, self._blank(s, 1)], 2)

    def write(self, keys: Tensor, values: Tensor, ids: Tensor) -> None:
        """Append the token's K and V. [B, H, 1, D], [B, H, 1, Dv], [B, 1, 1] int64."""
        keys = keys if self._shape.rotation is None else self._shape.rotation.pair(keys)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        for s, first in self._written(keys, values, self.position[:, :, -1:], ids).items():
            if s.per == "slot":
                self.states[s][:, :, -1] = first[:, :, 0].to(self._state_dtype)
            else:
                self.states[s] = self.states[s] + first.double().sum(2)

    def _written(self, keys: Tensor, values: Tensor, position: Tensor, ids: Tensor) -> Mapping[Statistic, Tensor]:
        """Compute what statistics note of tokens when they are written. [B, H, n, *k] each."""
        token = Written(keys, values, position, ids, self._rotated, self._output)
        notes = {s: s.written(token) for s in self.states}
        return {s: x for s, x in notes.items() if x is not None}

    def _rotated(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate paired vectors to positions. [..., D], [...] int64."""
        rotation = self._shape.rotation
        if rotation is None or not x.numel():
            return x
        return rotate(x.contiguous(), rotation.factors(position.expand(x.shape[:-1]), x.dtype, LONGEST_STREAM))

    def attend(self, query: Tensor, terms: Terms) -> Tensor:
        """Attend over the cached tokens with the queries of one layer. [B, H * g, 1, D] -> [B, H * g, 1, Dv]."""
        shape, held = self._shape, self.position.shape[2] - self.lags
        queries = query.view(len(query), shape.heads, -1, shape.key_dim)
        queries = queries if shape.rotation is None else shape.rotation.pair(queries)
        keys, values = self.keys[:, :, :held], self.values[:, :, :held]
        own, places = self._places(held)
        scores = self._rotated(queries, own) * terms.scaling @ self._rotated(keys, places).mT
        mass = weights(scores.flatten(0, 1), terms, shape.heads).view(scores.shape)
        out = mass.to(values.dtype) @ values
        self._attention.append(
            {
                "weights": pad(mass, (0, self.lags)),
                "logits": pad(logits_of(scores, terms), (0, self.lags), value=-inf),
                "queries": queries,
                "outputs": out,
            }
        )
        return out.view(*query.shape[:3], -1)

    def _places(self, held: int) -> tuple[Tensor, Tensor]:
        """Positions that RoPE gives the query and the first `held` tokens. [], [B, H, n] int64."""
        position, limit = self.position[:, :, :held], self._setting.limit
        if self._setting.positions == "cache":
            return torch.tensor(self.position.shape[2] - 1), torch.arange(held).expand_as(position)
        if self._setting.positions == "stream":
            return torch.tensor(self._step), position
        return torch.tensor(limit), limit - (self._step - position).clamp(max=limit)

    def end(self) -> None:
        """After the last layer: update the statistics, and evict from each head the lowest (importance, rank)."""
        together = {name: torch.cat([of_layer[name] for of_layer in self._attention], 2) for name in self._attention[0]}
        view = self._view()
        for s, state in self.states.items():
            if s.sees:
                self.states[s] = s.update(state, Attention(**{name: together[name] for name in s.sees}), view)
        if self._kept is None or self.position.shape[2] <= self._kept:
            return
        importance, window = self._policy.importance(self._view()), self._shape.sliding_window
        if window is not None:  # no later query sees these
            importance = importance.masked_fill(self._step - self.position >= window - 1, -inf)
        self._evict(importance.argmin(-1))

    def _view(self) -> CacheView:
        """The cache, as a policy sees it."""
        heads, tokens = self.position.shape[1:]
        layer, step, prompt = (torch.tensor([[[x]]]) for x in (self._index, self._step, 0))
        rank = torch.arange(tokens).expand_as(self.position)
        return CacheView(
            rank,
            self.position,
            step,
            self.keys,
            self.values,
            self.states,
            layer,
            torch.arange(heads)[None, :, None],
            prompt,
            self._caches,
            self._setting.seed,
            self._rotated,
        )

    def _evict(self, victim: Tensor) -> None:
        """Take one token out of every head. [B, H] int64."""
        leaves = torch.zeros_like(self.position, dtype=torch.bool).scatter_(2, victim[..., None], value=True)

        def part(x: Tensor, which: Tensor) -> Tensor:
            return x[which].unflatten(0, (*self.position.shape[:2], -1))

        keys, values, position = (part(x, leaves) for x in (self.keys, self.values, self.position))
        for s, lost in self._written(keys, values, position, torch.zeros_like(position)).items():
            if s.per == "head":
                self.states[s] = self.states[s] - lost.double().sum(2)
        self.states = {s: x if s.per == "head" else part(x, ~leaves) for s, x in self.states.items()}
        self.keys, self.values, self.position = (part(x, ~leaves) for x in (self.keys, self.values, self.position))


class PlainDecoder:
    """Reads streams of equal length token by token, on the CPU."""

    def __init__(self, hf: PreTrainedModel, setting: Setting, streams: int = 1) -> None:
        """Begin with empty caches.

        Raises:
            ValueError: the policy can't serve the capacity, its heads keep different numbers of tokens, or layers that share K
                and V differ in their heads, sliding windows or RoPE.
            LookupError: the engine's attention function can't answer the model, or RoPE of a layer is unknown.
        """
        self._hf, self._ids, self._step = hf, torch.zeros(streams, 1, dtype=torch.int64), 0
        self._sources = kv_sources(hf.config.get_text_config())
        with torch.inference_mode():
            shapes, _, _ = layer_shapes(hf, None)
        owners = sorted(set(self._sources))
        _refuse_uneven(setting, len(owners), shapes[0].heads)
        projections = output_projections(hf)
        self._caches: dict[int, _Cache] = {}
        for index, owner in enumerate(owners):
            readers = [layer for layer, source in enumerate(self._sources) if source == owner]
            if any(shapes[reader] != shapes[owner] for reader in readers):
                raise ValueError(f"layers {readers} share K and V, but differ in their heads, sliding windows or RoPE")
            shape = replace(shapes[owner], group=len(readers) * shapes[owner].group)
            parts = [projections[x].unflatten(1, (shape.heads, shapes[owner].group, -1)) for x in readers if x in projections]
            output = torch.cat(parts, 2).permute(1, 2, 0, 3) if len(parts) == len(readers) else None
            lags = readers[0] < owner
            self._caches[owner] = _Cache(shape, setting, index, len(owners), lags, output, streams, hf.dtype)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens. [B, T] int64 -> logits after each, [B, T, V]."""
        return torch.cat([self._read(token) for token in tokens.split(1, 1)], 1)

    def _read(self, tokens: Tensor) -> Tensor:
        """Read one token of each stream. [B, 1] int64 -> [B, 1, V]."""
        self._ids = tokens
        for cache in self._caches.values():
            cache.begin(self._step)
        logits = forward(self._hf, tokens, torch.zeros_like(tokens), self, torch.zeros(1, dtype=torch.int64))
        for cache in self._caches.values():
            cache.end()
        self._step += 1
        return logits

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Attention of one layer, as the engine's `Backend` has it."""
        source = self._sources[layer]
        if source == layer:
            self._caches[source].write(keys, values, self._ids[:, None])
        return self._caches[source].attend(query, terms)

    def kept(self) -> list[list[list[list[int]]]]:
        """Positions held, oldest first, per cache, stream and KV head."""
        return [cache.position.tolist() for cache in self._caches.values()]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V that are held."""
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in self._caches.values())


def _refuse_uneven(setting: Setting, caches: int, heads: int) -> None:
    """Refuse policies that this decoder can't serve: all heads must keep as many tokens.

    Raises:
        ValueError: the policy keeps no cache, or gives its heads different budgets.
    """
    policy, name = setting.policy, type(setting.policy).__name__
    if not policy.caches or policy.outcome:
        raise ValueError(f"{name}: only policies that evict after every step are served")
    if setting.capacity is None:
        return
    bound = policy.bind(setting.capacity)
    if bound.budgets(setting.capacity, caches, heads, None) is not None or bound.pool_floor(setting.capacity) is not None:
        raise ValueError(f"{name}: its heads keep different numbers of tokens, which is not served")
