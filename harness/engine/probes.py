"""Probe a model at load: the shapes of its layers, whether layers share K and V, and the projection after attention.

Axis letters: B streams, T tokens, H KV heads, G query heads of a KV head, D head dim, E hidden size.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.harness.engine.attention import (
    BACKEND,
    STAND_INS,
    RotaryFunctions,
    StandIn,
    Terms,
    forward,
    is_same,
    rotary_functions,
)
from kvbench.harness.engine.rotary import Rotation, find_rotation
from kvbench.harness.engine.slots import LayerShape

_PROBE_POSITIONS = (1, 5, 191)
NOT_ROUTED = "its attention does not go through transformers' AttentionInterface in every layer"
SHARED_KV = "its layers share K and V; `bench shared-kv` reads it token by token"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


Observed = dict[int, tuple[Tensor, Tensor, Tensor, Terms]]  # q, k, v and terms of each layer


class Probe:
    """Records every layer's q, k, v and terms. Its output is 0, so that no layer depends on another's attention."""

    def __init__(self) -> None:
        self.observed: Observed = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Record the inputs of a layer's attention, and return zeros. Arguments are those of `Backend.attend`."""
        if layer in self.observed:
            raise LookupError("two of its attention modules share one layer index")
        self.observed[layer] = (query, keys, values, terms)
        return query.new_zeros(*query.shape[:-1], values.shape[-1])


class _ProbeOutputs(Probe):
    """Records the matrix that multiplies each layer's attention output next."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, Tensor] = {}
        self._waiting: tuple[int, int] | None = None  # layer, width of its output

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        self._waiting = layer, query.shape[1] * values.shape[-1]
        return super().attend(layer, query, keys, values, terms)

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of linear modules. It ignores forward passes of other contexts."""
        if BACKEND.get(None) is not self:
            return
        if self._waiting is not None and args and args[0].shape[-1] == self._waiting[1]:
            self.weights[self._waiting[0]] = module.get_parameter("weight")
        self._waiting = None


def output_projections(hf: PreTrainedModel) -> dict[int, Tensor]:
    """Return the weight of the first linear module after each layer's attention, if its input has the output's width.

    Returns:
        [E, H * G * Dv] by layer.
    """
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
    """Return the shape of every layer, the rotary functions that can be skipped, and whether positions are learned.

    Positions are learned if the model has no RoPE, but its keys depend on positions.
    """
    if rope_length is not None:
        _observe(hf, rope_length - 1, Probe())  # makes the model compute its tables for that length
        _freeze_rope(hf)
    at_zero = _observe(hf, 0, Probe()).observed
    if sorted(at_zero) != list(range(len(at_zero))) or not at_zero:
        raise LookupError(NOT_ROUTED)
    tables = [b for name, b in hf.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    positions = _PROBE_POSITIONS if tables else _PROBE_POSITIONS[:1]
    samples = {p: _observe(hf, p, Probe()).observed for p in positions}
    learned = not tables and not all(is_same(x, s[i][1]) for s in samples.values() for i, (_, x, _, _) in at_zero.items())
    shapes = []
    known: list[Rotation] = []
    for layer, (query, keys, values, terms) in sorted(at_zero.items()):
        device = None if keys.device == hf.device else keys.device
        both = {} if learned else {p: torch.cat(sample[layer][:2], 1) for p, sample in samples.items()}
        rotation = find_rotation(torch.cat([query, keys], 1), both, tables)
        rotation = next((r for r in known if rotation and _same(r, rotation)), rotation)  # so that layers share its tables
        known += [rotation] if rotation and rotation not in known else []
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        plain_softmax = terms.softcap is None and terms.sink_logits is None
        sizes = heads, group, keys.shape[-1], values.shape[-1]
        shapes.append(LayerShape(*sizes, rotation, terms.sliding_window, plain_softmax, device=device))
    return shapes, _idle_rotary(hf, at_zero), learned


def refuse_shared_kv(hf: PreTrainedModel) -> None:
    """Refuse a model in which a layer attends over another layer's K and V: it has fewer caches than the engine would count.

    K and V of a few tokens are compared, because families declare sharing in different ways.
    """
    owners: dict[bytes, int] = {}
    for layer, (_, keys, values, _) in sorted(_observe(hf, 0, Probe()).observed.items()):
        of_tokens = torch.cat([x.double().transpose(1, 2).flatten(2) for x in (keys, values)], -1)[0].cpu()
        differ = bool((of_tokens != of_tokens[0]).any())  # equal K and V of different tokens prove nothing
        if differ and owners.setdefault(of_tokens.numpy().tobytes(), layer) != layer:
            raise LookupError(SHARED_KV)
    if any(getattr(module, "is_kv_shared_layer", False) for module in hf.modules()):
        raise LookupError("its layers reuse what other layers cache")


def _idle_rotary(hf: PreTrainedModel, at_zero: Observed) -> RotaryFunctions:
    """Return the model's rotary functions, if skipping them changes no query or key at position 0; otherwise none."""
    places = rotary_functions(hf)
    for stand_in in STAND_INS if places else ():
        functions = RotaryFunctions(places, stand_in)
        try:
            without = _observe(hf, 0, Probe(), stand_in).observed
        except (LookupError, ValueError):  # the functions don't take queries and keys, or don't return them
            break
        if all(is_same(sample[0], without[i][0]) and is_same(sample[1], without[i][1]) for i, sample in at_zero.items()):
            return functions
    return RotaryFunctions()


def _same(a: Rotation, b: Rotation) -> bool:
    same_device = a.order.device == b.order.device
    return same_device and torch.equal(a.frequencies, b.frequencies) and torch.equal(a.order, b.order)


ProbeKind = TypeVar("ProbeKind", bound=Probe)


def _observe(hf: PreTrainedModel, position: int, probe: ProbeKind, stand_in: StandIn | None = None) -> ProbeKind:
    """Run a model with a probe on a few tokens, all at one position. stand_in: as in `answered_by`."""
    count = min(8, hf.config.get_text_config().vocab_size)
    tokens = torch.arange(count, device=hf.device)[None]
    try:
        last = torch.full((1,), count - 1, device=hf.device)
        forward(hf, tokens, torch.full_like(tokens, position), probe, last, stand_in)
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise LookupError(f"its forward pass fails under our attention: {str(error).splitlines()[0]}") from error
    return probe


def adaptive_rope(hf: PreTrainedModel) -> list[str]:
    """Return the model's RoPE types, if one of them depends on the longest position; otherwise an empty list."""
    kinds: set[str] = set()
    for module in hf.modules():
        kind = getattr(module, "rope_type", None)
        kinds |= set(kind.values()) if isinstance(kind, dict) else {kind} if isinstance(kind, str) else set()
    return sorted(kinds) if kinds & set(_LENGTH_DEPENDENT_ROPE) else []


def _freeze_rope(hf: PreTrainedModel) -> None:
    """Make the current RoPE tables permanent. An adaptive type would read every block's positions, which syncs with the host."""
    for module in hf.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]
        elif kind in _LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"  # type: ignore[assignment]
