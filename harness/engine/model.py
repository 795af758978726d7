"""Wraps an unmodified Hugging Face model so that the decode loop can drive it.

Axis letters: B streams, T tokens, V vocabulary, L layers, H KV heads, G query heads of a KV head, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.harness.engine import interface
from kvbench.harness.engine.attention import Terms, causal
from kvbench.harness.engine.fused import FusedStepError, fused_logits
from kvbench.harness.engine.rotary import Rotation, find_rotation
from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.engine.unrotated import STAND_INS, RotaryFunctions, is_same, rotary_functions
from kvbench.harness.engine.variants.base import VariantForCausalLM

_PROBE_POSITIONS = (1, 5, 191)
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class UnsupportedModelError(ValueError):
    """This model can't be driven exactly; the message says why."""


class Reader(NamedTuple):
    """A layer's place among the layers that read one cache."""

    cache: int  # index in `Model.layers`
    place: int  # 0: the layer that computes K and V


@dataclass
class Model:
    """A model the decode loop can drive.

    Attributes:
        hf: the Hugging Face model; `interface` computes its attention.
        layers: the shape of each layer that computes K and V, for its cache. A layer that reads another's is not among them.
        readers: of each of the model's layers, which cache it reads.
        training_length: longest position seen in training, in tokens; None if the config does not say.
        check: result of the self-check, in units of rounding error; None if it did not run.
        idle_rotary: its functions that rotate queries and keys, if they leave them unchanged at position 0; else none.
    """

    hf: PreTrainedModel
    layers: list[LayerShape] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    training_length: int | None = None
    check: float | None = None
    idle_rotary: RotaryFunctions = field(default_factory=RotaryFunctions)
    _fused: bool = field(default=False, repr=False)
    _outputs: dict[int, Tensor] | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the first weights, to which tokens come."""
        return self.hf.device

    @property
    def devices(self) -> list[torch.device]:
        """Devices of the layers, each once."""
        return list(dict.fromkeys([self.device, *(shape.device or self.device for shape in self.layers)]))

    @property
    def may_capture(self) -> bool:
        """Whether a CUDA graph can hold a step: one device computes it."""
        return len(self.devices) == 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of K and V."""
        return self.hf.dtype

    def kv_bytes(self, capacity: int, streams: int = 1) -> int:
        """Bytes of a cache's K/V slots: `capacity + 1` slots per layer and KV head, fewer under a sliding window."""
        slots = ((shape, (shape.kept(capacity) or 0) + 1) for shape in self.layers)
        return streams * sum(s.kv_bytes_per_token(self.dtype) * count for s, count in slots)

    @property
    def shares_caches(self) -> bool:
        """Whether layers read another layer's K and V."""
        return len(self.readers) > len(self.layers)

    def shape_of(self, layer: int) -> LayerShape:
        """The shape of the cache that a layer of the model reads."""
        return self.layers[self.readers[layer].cache]

    def output_of(self, cache: int) -> Tensor | None:
        """The matrices that the attention outputs of a cache's layers go through, by KV head. [H, G, E, Dv].

        None if one of the layers has no such matrix.
        """
        if self._outputs is None:
            self._outputs = output_projections(self)
        shape, parts = self.layers[cache], []
        for layer, reader in enumerate(self.readers):
            if reader.cache == cache:
                weight = self._outputs.get(layer)
                if weight is None:
                    return None
                parts.append(weight.unflatten(1, (shape.heads, shape.group_of_reader, -1)).permute(1, 2, 0, 3))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def facts(self) -> dict[str, Any]:
        """Facts about the model, for the record."""
        return {
            "model_type": str(self.hf.config.model_type),
            "training_length": self.training_length,
            "vocab_size": getattr(self.hf.config.get_text_config(), "vocab_size", None) or None,
            "self_check": self.check,
            "kv_shapes": self._kv_shapes(),
        }

    def _kv_shapes(self) -> list[dict[str, Any]]:
        """The shapes of K and V, by kind of layer that computes them, so that a reader of the record can compute their bytes."""
        kinds = Counter((s.heads, s.key_dim, s.value_dim, s.sliding_window) for s in self.layers)
        names = ("heads", "key_dim", "value_dim", "sliding_window")
        return [{"layers": count, **dict(zip(names, kind, strict=True))} for kind, count in kinds.items()]

    def __call__(self, tokens: Tensor, backend: interface.Backend, keep: Tensor | int = 0) -> Tensor:
        """Logits of a block.

        Args:
            tokens: [B, T] int64.
            backend: computes every layer's attention.
            keep: indices of the tokens whose logits to return, or how many of the last; 0 = all.

        Returns:
            [B, T or kept tokens, V], the model's dtype.
        """
        if self.shares_caches and isinstance(keep, int) and keep:  # an integer makes Gemma 4 leave out queries
            keep = torch.arange(tokens.shape[1] - keep, tokens.shape[1], device=tokens.device)
        with self.idle_rotary.skipped():
            if self._fused and tokens.shape[1] == 1 and isinstance(keep, int):
                with interface.answered_by(backend):
                    return fused_logits(self.hf, tokens)
            return _forward(self.hf, tokens, torch.zeros_like(tokens), backend, keep)

    @contextmanager
    def fused_steps(self, streams: int) -> Iterator[None]:
        """Read single tokens in as few kernels as a compiler can make of the model, with the same logits but for rounding.

        For warming up and capturing a CUDA graph: outside of one, the work of the host would take longer than these kernels.

        Args:
            streams: B of the steps. The first time for a number of streams compiles, which takes seconds a layer.

        Raises:
            FusedStepError: on entry, if the model can't be compiled, or its layers share K and V.
        """
        if self.shares_caches:
            raise FusedStepError("layers share K and V")
        tokens = torch.zeros(streams, 1, dtype=torch.int64, device=self.device)
        self._fused = True
        try:
            with torch.inference_mode():
                self(tokens, _Probe())
            yield
        finally:
            self._fused = False


def _forward(hf: PreTrainedModel, tokens: Tensor, positions: Tensor, backend: interface.Backend, keep: Tensor | int) -> Tensor:
    """The model's forward pass, with attention computed by `backend`."""
    with interface.answered_by(backend):
        out = hf(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep)
    logits: Tensor = out.logits
    return logits


Observed = dict[int, tuple[Tensor, Tensor, int, Terms]]  # q, k, value dims and terms of each layer


class _Probe:
    """Records every layer's q, k and terms. Its output is 0, so that no layer depends on another's attention."""

    def __init__(self) -> None:
        self.seen: Observed = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        if layer in self.seen:
            raise LookupError("two of its attention modules share one layer index")
        self.seen[layer] = (query, keys, values.shape[-1], terms)
        return query.new_zeros(*query.shape[:-1], values.shape[-1])


class _ProbeVectors(_Probe):
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


class _ProbeOutputs(_Probe):
    """Records which matrix each layer's attention output is multiplied by next."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, Tensor] = {}
        self._waiting: tuple[int, int] | None = None  # layer, width of its output

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        self._waiting = layer, query.shape[1] * values.shape[-1]
        return super().attend(layer, query, keys, values, terms)

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """A hook of linear modules, called with their input."""
        if self._waiting is not None and args and args[0].shape[-1] == self._waiting[1]:
            self.weights[self._waiting[0]] = module.get_parameter("weight")
        self._waiting = None


def output_projections(model: Model) -> dict[int, Tensor]:
    """The weight of the first linear module after each layer's attention, if it takes the attention's output. [E, H * G * Dv]."""
    probe = _ProbeOutputs()
    linear = [m for m in model.hf.modules() if isinstance(m, torch.nn.Linear)]
    hooks = [m.register_forward_pre_hook(probe.before) for m in linear]
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            _forward(model.hf, tokens, torch.zeros_like(tokens), probe, 1)
    finally:
        for hook in hooks:
            hook.remove()
    return probe.weights


def adopt(hf: PreTrainedModel, rope_length: int | None = None) -> Model:
    """Route a model's attention to `interface`, and find the shape of its layers with probe runs.

    `selfcheck.check` then compares it with its own forward pass.

    Args:
        hf: any causal language model, in evaluation mode.
        rope_length: longest position + 1, in tokens, for RoPE types whose tables depend on it (dynamic, longrope). The
            tables of that length are used for all positions.

    Raises:
        UnsupportedModelError: it can't be driven exactly; the message says why.
    """
    if isinstance(hf, VariantForCausalLM) and hf.undrivable is not None:
        raise UnsupportedModelError(hf.undrivable)
    hf.requires_grad_(False)
    hf.set_attn_implementation(interface.NAME)
    if _rope_types(hf) & set(_LENGTH_DEPENDENT_ROPE) and rope_length is None:
        raise UnsupportedModelError(
            f"its RoPE ({', '.join(sorted(_rope_types(hf)))}) depends on the longest position: set model.rope_length"
        )
    length = getattr(hf.config.get_text_config(), "max_position_embeddings", None)
    model = Model(hf, training_length=length if isinstance(length, int) else None)
    try:
        with torch.inference_mode():
            model.layers, model.readers = _caches(_layer_shapes(model, rope_length), _sources(model))
    except LookupError as error:
        raise UnsupportedModelError(str(error)) from None
    return model


def _layer_shapes(model: Model, rope_length: int | None) -> list[LayerShape]:
    """Heads, dims, sliding window and rotation of every layer, from probe runs."""
    if rope_length is not None:
        _observe(model, rope_length - 1, _Probe())  # makes the model compute its tables for that length
        _freeze_rope(model.hf)
    at_zero = _observe(model, 0, _Probe()).seen
    if sorted(at_zero) != list(range(len(at_zero))) or not at_zero:
        raise LookupError("its attention does not go through transformers' AttentionInterface in every layer")
    model.idle_rotary = _idle_rotary(model, at_zero)
    samples = {p: _observe(model, p, _Probe()).seen for p in _PROBE_POSITIONS}
    tables = [b for name, b in model.hf.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    shapes = []
    known: list[Rotation] = []
    for layer, (query, keys, value_dim, terms) in sorted(at_zero.items()):
        device = None if keys.device == model.device else keys.device
        rotation = find_rotation(
            torch.cat([query, keys], 1),
            {p: torch.cat(seen[layer][:2], 1) for p, seen in samples.items()},
            tables,
        )
        rotation = next((r for r in known if rotation and _same(r, rotation)), rotation)  # so that layers share its tables
        known += [rotation] if rotation and rotation not in known else []
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        plain = terms.softcap is None and terms.sink_logits is None
        sizes = heads, group, keys.shape[-1], value_dim
        shapes.append(LayerShape(*sizes, rotation, terms.sliding_window, plain, device=device))
    return shapes


def _sources(model: Model) -> list[int]:
    """Of every layer, the first one that attends over the same K and V: itself, if they are its own.

    K and V of a few tokens are compared, and not their storage or the config: a copy need not be kept twice either, and this
    holds for any family.

    Raises:
        LookupError: the model says that a layer reuses what another cached, but that is not K and V.
    """
    first: dict[tuple[Any, ...], int] = {}
    sources = {}
    for layer, vectors in _observe(model, 0, _ProbeVectors()).vectors.items():
        x = torch.cat([v.double().flatten(3).transpose(1, 2).flatten(2) for v in vectors], -1)[0].cpu()  # [T, H * (D + Dv)]
        tells = bool(x.isfinite().all()) and bool((x != x[0]).any())  # layers that are all 0 don't share a cache
        name = (*(v.shape for v in vectors), x.numpy().tobytes())
        sources[layer] = first.setdefault(name, layer) if tells else layer
    for module in model.hf.modules():
        index: Any = getattr(module, "layer_idx", None)
        if getattr(module, "is_kv_shared_layer", False) and sources.get(index) == index:
            raise LookupError(f"its layer {index} reuses what another layer cached, but its K and V are its own")
    return [sources[layer] for layer in sorted(sources)]


def _caches(shapes: Sequence[LayerShape], sources: Sequence[int]) -> tuple[list[LayerShape], list[Reader]]:
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
        caches.append(replace(shape, group=readers * shape.group, readers=readers))
    return caches, [Reader(owners.index(source), sources[:layer].count(source)) for layer, source in enumerate(sources)]


def _idle_rotary(model: Model, at_zero: Observed) -> RotaryFunctions:
    """The model's rotary functions, if all queries and keys at position 0 are the same without them."""
    places = rotary_functions(model.hf)
    for stand_in in STAND_INS if places else ():
        functions = RotaryFunctions(places, stand_in)
        try:
            with functions.skipped():
                without = _observe(model, 0, _Probe()).seen
        except (LookupError, ValueError):  # they don't take queries and keys, or don't return them
            break
        if all(is_same(seen[0], without[i][0]) and is_same(seen[1], without[i][1]) for i, seen in at_zero.items()):
            return functions
    return RotaryFunctions()


def _same(a: Rotation, b: Rotation) -> bool:
    same_device = a.order.device == b.order.device
    return same_device and torch.equal(a.frequencies, b.frequencies) and torch.equal(a.order, b.order)


ProbeKind = TypeVar("ProbeKind", bound=_Probe)


def _observe(model: Model, position: int, probe: ProbeKind) -> ProbeKind:
    """Show a probe every layer's attention, for a few tokens all at one position."""
    count = min(8, model.hf.config.get_text_config().vocab_size)
    tokens = torch.arange(count, device=model.device)[None]
    try:
        _forward(model.hf, tokens, torch.full_like(tokens, position), probe, torch.full((1,), count - 1, device=model.device))
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise LookupError(f"its forward pass fails under our attention: {str(error).splitlines()[0]}") from error
    return probe


def _rope_types(hf: PreTrainedModel) -> set[str]:
    """RoPE types of the model's tables."""
    kinds: set[str] = set()
    for module in hf.modules():
        kind = getattr(module, "rope_type", None)
        kinds |= set(kind.values()) if isinstance(kind, dict) else {kind} if isinstance(kind, str) else set()
    return kinds


def _freeze_rope(hf: PreTrainedModel) -> None:
    """Keep the current tables. An adaptive RoPE type would read every block's positions, which syncs with the host."""
    for module in hf.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]
        elif kind in _LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"  # type: ignore[assignment]
