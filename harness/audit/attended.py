"""Record the rows that a model attends to under a cache of unknown kind: their tokens, their positions and the mask.

Only the public interface of a cache is used. Keys and values are recorded as they enter and leave `update`. A returned row holds
the token whose value it equals. The rotation between the returned key and the key as it entered is the distance by which the
cache moved the token. The mask is recorded where the model calls transformers' attention function.

Axis letters: H KV heads, N tokens read, S rows that `update` returned, T tokens of a block, D head dim, R rows, P pairs of dims.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.watch import layers_of

UNKNOWN = -1  # token of a row that equals none of the tokens read
UNPLACED = -(10**9)  # position of a key that is no rotation of its token's key
_CLEARLY_CLOSER = 0.5  # maximum error of the best rotation of a rotated key, relative to the error without rotation
_UNLIKE = 0.5  # relative difference from which a row does not belong to a token; quantized rows differ by less


@dataclass(frozen=True)
class Read:
    """Rows that one layer attended to in one forward pass, for the first text of a batch.

    Attributes:
        first: index of the first token of the block.
        queries: positions of the block's queries. [T] int64.
        tokens: index of the token in each row that `update` returned, or `UNKNOWN`. [H, S] int64.
        places: position that RoPE gave to each row's key, or `UNPLACED`. [H, S] int64.
        visible: rows that each query sees by the mask. [T, S] bool.
        window: tokens that a query may see by the model's own sliding window; None for all.
        error: largest relative difference between a row and its token's value, 0 if values are stored exactly.
    """

    layer: int
    first: int
    queries: Tensor
    tokens: Tensor
    places: Tensor
    visible: Tensor
    window: int | None
    error: float

    def held(self) -> list[list[int]]:
        """Return the tokens held before the block, ascending, by KV head."""
        return [sorted(t for t in head if 0 <= t < self.first) for head in self.tokens.tolist()]


class Recorder:
    """Records the reads of forward passes with one cache.

    Attributes:
        reads: reads of the last forward pass, by layer.
        token_bytes: bytes of the keys and values of one token, over all layers.
    """

    def __init__(self, rotations: list[Rotation | None]) -> None:
        """Create a recorder without reads. rotations: RoPE of every layer; if empty, keys that the cache moved are `UNPLACED`."""
        self._rotations = rotations
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # keys [H, N, D] and values of all tokens read, by layer
        self._positions = torch.zeros(0, dtype=torch.int64)  # at which the model rotated the tokens read. [N]
        self.reads: dict[int, Read] = {}
        self.token_bytes = 0

    @contextmanager
    def on(self, hf: PreTrainedModel, cache: Cache) -> Iterator[None]:
        """Record the forward pass in this context. Enter a new context for each forward pass."""
        self.reads = {}
        update, name = cache.update, hf.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get(name)

        def recorded(keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self._note_given(layer_idx, keys, values)
            return update(keys, values, layer_idx, *args, **kwargs)

        def shown(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
            self._note_read(module.layer_idx, key, value, mask, kwargs.get("sliding_window"), query.shape[2])
            compute = attention or sys.modules[type(module).__module__].eager_attention_forward  # each family has its own
            return compute(module, query, key, value, mask, *args, **kwargs)

        hook = layers_of(hf)[0].register_forward_pre_hook(self._note_positions, with_kwargs=True)
        vars(cache)["update"], ALL_ATTENTION_FUNCTIONS[name] = recorded, shown
        try:
            yield
        finally:
            del vars(cache)["update"], ALL_ATTENTION_FUNCTIONS[name]
            if ALL_ATTENTION_FUNCTIONS.get(name) is not attention:  # another one was registered over transformers' own
                ALL_ATTENTION_FUNCTIONS[name] = attention
            hook.remove()

    def _note_positions(self, _module: nn.Module, _args: Any, given: dict[str, Any]) -> None:
        self._positions = torch.cat([self._positions, given["position_ids"][0].cpu()])

    def _note_given(self, layer: int, keys: Tensor, values: Tensor) -> None:
        before = self._given.get(layer)
        if before is None:
            self.token_bytes += (keys[0, :, 0].nbytes + values[0, :, 0].nbytes) * len(keys)
        new = keys[0].float().cpu(), values[0].float().cpu()
        self._given[layer] = new if before is None else (torch.cat([before[0], new[0]], 1), torch.cat([before[1], new[1]], 1))

    def crop(self, count: int) -> None:
        """Forget the newest tokens."""
        self._positions = self._positions[:-count]
        self._given = {layer: (keys[:, :-count], values[:, :-count]) for layer, (keys, values) in self._given.items()}

    def _note_read(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None, window: int | None, count: int) -> None:
        """Record an attention call. keys, values: rows that `update` returned. [B, H, S, D]."""
        given_keys, given_values = self._given[layer]
        tokens, error = _identified(values[0].float().cpu(), given_values)
        places = self._places(layer, keys[0].float().cpu(), given_keys, tokens)
        first = given_keys.shape[1] - count
        visible = _visible(mask, count, keys.shape[2])
        self.reads[layer] = Read(layer, first, self._positions[-count:], tokens, places, visible, window, error)

    def _places(self, layer: int, keys: Tensor, given: Tensor, tokens: Tensor) -> Tensor:
        """Return the position that RoPE gave to each row's key. [H, S, D], [H, N, D], [H, S] -> [H, S]."""
        own = given.gather(1, tokens.clamp(min=0)[..., None].expand(*tokens.shape, given.shape[-1]))
        places = self._positions[tokens.clamp(min=0)]
        moved = (tokens != UNKNOWN) & (keys != own).any(-1)
        if bool(moved.any()):
            rotation = self._rotations[layer] if self._rotations else None
            places[moved] += _distance(own[moved], keys[moved], rotation, 2 * int(self._positions.max()) + 2)
        return torch.where(places < UNPLACED // 2, UNPLACED, places)


def _identified(rows: Tensor, given: Tensor) -> tuple[Tensor, float]:
    """Return the token of each row, and the largest relative difference. [H, S, D], [H, N, D] -> [H, S]."""
    distance, tokens = torch.cdist(rows, given, compute_mode="donot_use_mm_for_euclid_dist").min(-1)
    relative = distance / given.norm(dim=-1).gather(1, tokens).clamp(min=1e-12)
    is_known = relative < _UNLIKE
    return torch.where(is_known, tokens, UNKNOWN), float(relative[is_known].max()) if is_known.any() else 0.0


def _distance(own: Tensor, keys: Tensor, rotation: Rotation | None, longest: int) -> Tensor:
    """Return the distance by which RoPE moved each key, or `UNPLACED`. [R, D], [R, D] -> [R] int64."""
    if rotation is None:
        is_same = (keys - own).norm(dim=-1) < _UNLIKE * own.norm(dim=-1)
        return torch.where(is_same, 0, UNPLACED)
    before, after = (torch.view_as_complex(x[:, rotation.order.cpu()].unflatten(-1, (-1, 2)).contiguous()) for x in (own, keys))
    candidates = torch.arange(-longest, longest + 1)
    angles = candidates[:, None].double() * rotation.frequencies.cpu()
    factors = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)  # [candidates, P]
    best = ((before.conj() * after) @ factors.conj().T).real.argmax(-1)
    own_error, error = ((after - x).abs().norm(dim=-1) / before.abs().norm(dim=-1) for x in (before, before * factors[best]))
    is_rotated = error <= _CLEARLY_CLOSER * own_error  # otherwise, rounding hides how far a key of slow dims was moved
    return torch.where(error < _UNLIKE, torch.where(is_rotated, candidates[best], 0), UNPLACED)


def _visible(mask: Tensor | None, count: int, rows: int) -> Tensor:
    """Return the rows that each query sees. mask: [B, 1 or Q, T, S], bool or added to the scores. -> [T, S] bool."""
    if mask is None:  # transformers then attends causally, aligned at the first row, or a single token to all rows
        return torch.ones(count, rows, dtype=torch.bool).tril(rows if count == 1 else 0)
    shown = mask[0, 0].cpu()
    return shown if shown.dtype == torch.bool else shown > -1.0
