"""Probe a model at load: the shapes of its layers, the layers that share K and V, and the projection after attention.

Axis letters: B streams, T tokens, H KV heads, G query heads of a KV head, D head dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.harness.engine.attention import (
    BACKEND,
    STAND_INS,
    RotaryFunctions,
    Terms,
    causal,
    forward,
    is_same,
    rotary_functions,
)
from kvbench.harness.engine.rotary import Rotation, find_rotation
from kvbench.harness.engine.slots import LayerShape

_PROBE_POSITIONS = (1, 5, 191)
NOT_ROUTED = "its attention does not go through transformers' AttentionInterface in every layer"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class LayerCache(NamedTuple):
    """The cache that a layer reads, and its place among the layers that do."""

    cache: int  # index in `Model.layers`
    place: int  # 0: the layer that computes K and V; the last one, if they lag


Observed = dict[int, tuple[Tensor, Tensor, int, Terms]]  # q, k, value dims and terms of each layer


class Probe:
    """Records every layer's q, k and terms. Its output is 0, so that no layer depends on another's attention."""

    def __init__(self) -> None:
        self.seen: Observed = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Attention of one layer, as `Backend` has it."""
        if layer in self.seen:
            raise LookupError("two of its attention modules share one layer index")
        self.seen[layer] = (query, keys, values.shape[-1], terms)
        return query.new_zeros(*query.shape[:-1], values.shape[-1])


class _ProbeVectors(Probe):
    """Records every layer's K and V, in the order of the layers' calls, under attention as it is.

    So what a layer is given differs from layer to layer, even in a model that has nothing but attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vectors: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        super().attend(layer, query, keys, values, terms)
        self.vectors[layer] = keys, values
        return causal(query.unflatten(1, (keys.shape[1], -1)), keys, values, terms).flatten(1, 2)


class _ProbeOutputs(Probe):
    """Records which matrix each layer's attention output is multiplied by next."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, Tensor] = {}
        self._waiting: tuple[int, int] | None = None  # layer, width of its output

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        self._waiting = layer, query.shape[1] * values.shape[-1]
        return super().attend(layer, query, keys, values, terms)

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A hook of linear modules, called with their input. Forward passes of other contexts are none of its concern."""
        if BACKEND.get(None) is not self:
            return
        if self._waiting is not None and args and args[0].shape[-1] == self._waiting[1]:
            self.weights[self._waiting[0]] = module.get_parameter("weight")
        self._waiting = None


def output_projections(hf: PreTrainedModel) -> dict[int, Tensor]:
    """The weight of the first linear module after each layer's attention, if it takes the attention's output. [E, H * G * Dv]."""
    probe = _ProbeOutputs()
    linear = [m for m in hf.modules() if isinstance(m, torch.nn.Linear)]
    hooks = [m.register_forward_pre_hook(probe.before) for m in linear]
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=hf.device)
    try:
        with torch.inference_mode():
            forward(hf, tokens, torch.zeros_like(tokens), probe, 1)
    finally:
        for hook in hooks:
            hook.remove()
    return probe.weights


def layer_shapes(hf: PreTrainedModel, rope_length: int | None) -> tuple[list[LayerShape], RotaryFunctions, bool]:
    """Heads, dims, sliding window and rotation of every layer; the functions that rotate, if they can be left out.

    And whether tokens get their positions as they enter: queries and keys depend on them, and the model has no RoPE.
    """
    if rope_length is not None:
        _observe(hf, rope_length - 1, Probe())  # makes the model compute its tables for that length
        _freeze_rope(hf)
    at_zero = _observe(hf, 0, Probe()).seen
    if sorted(at_zero) != list(range(len(at_zero))) or not at_zero:
        raise LookupError(NOT_ROUTED)
    tables = [b for name, b in hf.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    positions = _PROBE_POSITIONS if tables else _PROBE_POSITIONS[:1]
    samples = {p: _observe(hf, p, Probe()).seen for p in positions}
    learned = not tables and not all(is_same(x, seen[i][1]) for seen in samples.values() for i, (_, x, _, _) in at_zero.items())
    shapes = []
    known: list[Rotation] = []
    for layer, (query, keys, value_dim, terms) in sorted(at_zero.items()):
        device = None if keys.device == hf.device else keys.device
        both = {} if learned else {p: torch.cat(seen[layer][:2], 1) for p, seen in samples.items()}
        rotation = find_rotation(torch.cat([query, keys], 1), both, tables)
        rotation = next((r for r in known if rotation and _same(r, rotation)), rotation)  # so that layers share its tables
        known += [rotation] if rotation and rotation not in known else []
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        plain = terms.softcap is None and terms.sink_logits is None
        sizes = heads, group, keys.shape[-1], value_dim
        shapes.append(LayerShape(*sizes, rotation, terms.sliding_window, plain, device=device))
    return shapes, _idle_rotary(hf, at_zero), learned


def sources(hf: PreTrainedModel) -> list[int]:
    """Return for each layer the index of the first layer that attends over the same K and V: its own index if none is earlier.

    K and V of a few tokens are compared, and not their storage or the config: a copy need not be kept twice either, and this
    holds for any family. Of a layer that reads a later one's, which aren't there yet, its module says which (`later_source`).

    Raises:
        LookupError: the model says that a layer reuses what another cached, but that is not K and V.
    """
    first: dict[tuple[Any, ...], int] = {}
    sources = {}
    for layer, vectors in _observe(hf, 0, _ProbeVectors()).vectors.items():
        x = torch.cat([v.double().flatten(3).transpose(1, 2).flatten(2) for v in vectors], -1)[0].cpu()  # [T, H * (D + Dv)]
        tells = bool(x.isfinite().all()) and bool((x != x[0]).any())  # layers that are all 0 don't share a cache
        name = (*(v.shape for v in vectors), x.numpy().tobytes())
        sources[layer] = first.setdefault(name, layer) if tells else layer
    for module in hf.modules():
        index: Any = getattr(module, "layer_idx", None)
        later: int | None = getattr(module, "later_source", None)
        if later is not None:
            sources[index] = later
        if getattr(module, "is_kv_shared_layer", False) and sources.get(index) == index:
            raise LookupError(f"its layer {index} reuses what another layer cached, but its K and V are its own")
    return [sources[layer] for layer in sorted(sources)]


def caches(shapes: Sequence[LayerShape], sources: Sequence[int]) -> tuple[list[LayerShape], list[LayerCache]]:
    """The caches of layers with these shapes, and the layers that read them.

    Raises:
        LookupError: a layer reads another's K and V in a way that one cache can't serve.
    """
    for layer, source in enumerate(sources):
        differs = [f.name for f in fields(LayerShape) if getattr(shapes[layer], f.name) != getattr(shapes[source], f.name)]
        if differs:
            what = differs[0].replace("_", " ")
            raise LookupError(f"its layer {layer} reads the K and V of layer {source}, but with another {what}")
    caches, owners = [], sorted(set(sources))
    for owner in owners:
        shape, readers = shapes[owner], sources.count(owner)
        lags = sources.index(owner) < owner
        caches.append(replace(shape, group=readers * shape.group, readers=readers, lags=lags))
    return caches, [LayerCache(owners.index(source), sources[:layer].count(source)) for layer, source in enumerate(sources)]


def _idle_rotary(hf: PreTrainedModel, at_zero: Observed) -> RotaryFunctions:
    """The model's rotary functions, if all queries and keys at position 0 are the same without them."""
    places = rotary_functions(hf)
    for stand_in in STAND_INS if places else ():
        functions = RotaryFunctions(places, stand_in)
        try:
            with functions.skipped():
                without = _observe(hf, 0, Probe()).seen
        except (LookupError, ValueError):  # they don't take queries and keys, or don't return them
            break
        if all(is_same(seen[0], without[i][0]) and is_same(seen[1], without[i][1]) for i, seen in at_zero.items()):
            return functions
    return RotaryFunctions()


def _same(a: Rotation, b: Rotation) -> bool:
    same_device = a.order.device == b.order.device
    return same_device and torch.equal(a.frequencies, b.frequencies) and torch.equal(a.order, b.order)


ProbeKind = TypeVar("ProbeKind", bound=Probe)


def _observe(hf: PreTrainedModel, position: int, probe: ProbeKind) -> ProbeKind:
    """Show a probe every layer's attention, for a few tokens all at one position."""
    count = min(8, hf.config.get_text_config().vocab_size)
    tokens = torch.arange(count, device=hf.device)[None]
    try:
        forward(hf, tokens, torch.full_like(tokens, position), probe, torch.full((1,), count - 1, device=hf.device))
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise LookupError(f"its forward pass fails under our attention: {str(error).splitlines()[0]}") from error
    return probe


def adaptive_rope(hf: PreTrainedModel) -> list[str]:
    """RoPE types among the model's tables that depend on the longest position."""
    kinds: set[str] = set()
    for module in hf.modules():
        kind = getattr(module, "rope_type", None)
        kinds |= set(kind.values()) if isinstance(kind, dict) else {kind} if isinstance(kind, str) else set()
    return sorted(kinds) if kinds & set(_LENGTH_DEPENDENT_ROPE) else []


def _freeze_rope(hf: PreTrainedModel) -> None:
    """Keep the current tables. An adaptive RoPE type would read every block's positions, which syncs with the host."""
    for module in hf.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]
        elif kind in _LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"  # type: ignore[assignment]
