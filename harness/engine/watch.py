"""Show the attention of any transformers model in chunks of queries, so that no [T, T] matrix is held in memory.

The model runs unmodified, with its own RoPE. Masks are not used: causality and sliding window are arguments of the attention
call. `check` compares the shown attention with the model's own. The decode loop is not involved, so models that the loop can't
drive can be watched, too.

Axis letters: B samples, T tokens, Q query heads, H KV heads, t queries of a chunk, L keys it may see, D key dim, Dv value dim,
E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.own_attention import attention_by, own_attention

NAME = "kv_bench_watch"
_MAX_SCORES = 2**23  # of a chunk
_CHECK_TOLERANCE = 1e-3  # relative to the largest hidden state


class NotWatchableError(ValueError):
    """The attention of this model can't be recorded; the message says why."""


@dataclass(frozen=True)
class Weighing:
    """Function from logits to attention weights, for attention without a softmax.

    A model declares it by a method of its config. `attention_weighing(module, query, scaling)` returns a `Weighing` for a
    layer's attention module and queries, [B, Q, t, D], or None for a softmax.

    Attributes:
        weights: returns the weights for logits, which are -inf for hidden keys. [B, Q, t, L] -> [B, Q, t, L].
        bounded: the weights of a query sum to at most 1, and the rest goes to no token. Otherwise any sum is possible.
    """

    weights: Callable[[Tensor], Tensor]
    bounded: bool

    def shares(self, weights: Tensor) -> Tensor:
        """Return each key's share of a query's attention: the weights, divided by their sum if it is unbounded. [..., L]."""
        return weights if self.bounded else weights / nonzero(weights.sum(-1, keepdim=True))


def nonzero(sums: Tensor) -> Tensor:
    """Replace sums of 0 by 1, so that weights that are all 0 give shares of 0."""
    return sums.masked_fill(sums == 0, 1)


def weighing_of(module: nn.Module, query: Tensor, scaling: float) -> Weighing | None:
    """Return the weighing of a layer's logits; None for a softmax. query: [B, Q, t, D]."""
    of_config = getattr(getattr(module, "config", None), "attention_weighing", None)
    weighing: Weighing | None = None if of_config is None else of_config(module, query, scaling)
    return weighing


@dataclass(frozen=True)
class Chunk:
    """Attention of consecutive queries of one layer.

    Attributes:
        layer: index of the layer, in the order of the forward pass.
        first: position of the first query.
        causal: later keys are hidden from a query, and keys after the last query are left out.
        logits: input of the softmax; -inf for hidden keys. [B, Q, t, L] float32 or wider.
        weights: [B, Q, t, L], dtype of the logits. Unbounded weights (sigmoids) are divided by their sum, as in Gu et al. 2024,
            arXiv:2410.10781.
        rest: weight that goes to no token: to a learned sink, to the 1 of a softmax off by one, or lost by clipping.
            [B, Q, t]; None if all weight goes to tokens.
        total: sum by which the weights were divided. [B, Q, t, 1]; None if they were not divided.
    """

    layer: int
    first: int
    causal: bool
    logits: Tensor
    weights: Tensor
    rest: Tensor | None
    total: Tensor | None = None

    def mix(self, values: Tensor) -> Tensor:
        """Return the attention output for these values. [B, Q, L, Dv] -> [B, Q, t, Dv]."""
        weights = self.weights if self.total is None else self.weights * self.total
        return weights.to(values.dtype) @ values


class Watcher:
    """Receives the attention and the hidden states of every layer, and ignores what no subclass uses."""

    def see_vectors(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Receive a layer's keys and values, as passed to its attention, before its chunks. [B, H, T, D], [B, H, T, Dv]."""

    def see_chunk(self, chunk: Chunk) -> None:
        """Receive a chunk of attention. Chunks come in the order of queries."""

    def see_hidden(self, layer: int, hidden: Tensor) -> None:
        """Receive the hidden states after a layer. [B, T, E]."""


@dataclass
class _Pass:
    """State of one forward pass."""

    watcher: Watcher
    layer: int = 0


_PASS: ContextVar[_Pass] = ContextVar("pass")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - sixth parameter, as in transformers' functions: wrappers pass it by position
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers. [B, Q, T, D], [B, H, T, D], [B, H, T, Dv] -> [B, T, Q, Dv]."""
    current = _PASS.get()
    terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    if s_aux is None and getattr(getattr(module, "config", None), "zero_sink", False):
        terms = terms._replace(sink_logits=query.new_zeros(query.shape[1]))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None:
        raise NotWatchableError("it gives its attention a mask of its own")
    current.watcher.see_vectors(current.layer, key, value)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    rows = max(1, _MAX_SCORES // (query.shape[:2].numel() * key.shape[2]))
    out = torch.empty(*query.shape[:3], value.shape[-1], dtype=value.dtype, device=value.device)
    for first in range(0, query.shape[2], rows):
        part = query[:, :, first : first + rows]
        chunk = _chunk(current.layer, part, key, first, causal, terms, weighing_of(module, part, terms.scaling))
        current.watcher.see_chunk(chunk)
        out[:, :, first : first + rows] = chunk.mix(value[:, :, : chunk.weights.shape[-1]])
    current.layer += 1
    return out.transpose(1, 2).contiguous(), None


def _chunk(layer: int, query: Tensor, keys: Tensor, first: int, causal: bool, terms: Terms, weighing: Weighing | None) -> Chunk:
    """Compute the attention of queries at positions `first`, `first + 1`, ... [B, Q, t, D], [B, Q, T, D]."""
    end = first + query.shape[2] if causal else keys.shape[2]
    logits = query @ keys[:, :, :end].mT * terms.scaling
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    if terms.softcap is not None:
        logits = torch.tanh(logits / terms.softcap) * terms.softcap
    if causal:
        age = torch.arange(first, end, device=query.device)[:, None] - torch.arange(end, device=query.device)
        hidden = age < 0 if terms.sliding_window is None else (age < 0) | (age >= terms.sliding_window)
        logits = logits.masked_fill(hidden, -torch.inf)
    elif terms.sliding_window is not None:
        raise NotWatchableError("it has a sliding window that looks ahead")
    if weighing is not None:
        weights = weighing.weights(logits)
        total = weights.sum(-1, keepdim=True)
        if weighing.bounded:
            return Chunk(layer, first, causal, logits, weights, (1 - total[..., 0]).clamp(min=0))
        return Chunk(layer, first, causal, logits, weights / nonzero(total), None, total)
    if terms.sink_logits is None:
        return Chunk(layer, first, causal, logits, logits.softmax(-1), None)
    sinks = terms.sink_logits.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)
    weights = torch.cat([logits, sinks], -1).softmax(-1)
    return Chunk(layer, first, causal, logits, weights[..., :-1], weights[..., -1])


AttentionInterface.register(NAME, _attention)


@torch.inference_mode()
def watch(hf: PreTrainedModel, watcher: Watcher, **inputs: Tensor) -> Tensor:
    """Run a model once, without its head, and show its layers to a watcher.

    Args:
        hf: any model whose attention goes through transformers' AttentionInterface. Its own attention is restored afterwards.
            A model that reads pixels must have no head.
        watcher: receives every layer.
        inputs: inputs of the model, of equal length: `input_ids` [B, T], or `pixel_values`.

    Returns:
        The last hidden states. [B, T, E].

    Raises:
        NotWatchableError: a layer's attention can't be shown.
    """
    if hf.main_input_name not in inputs:
        raise NotWatchableError(f"it reads {hf.main_input_name}, not {', '.join(inputs)}")
    if getattr(hf.config, "reads_later_layers", False):
        raise NotWatchableError("its layers read what a later one writes, so a text passes them several times")
    blocks, chunk = layers_of(hf), getattr(hf.config.get_text_config(), "attention_chunk_size", None)
    if chunk is not None and "input_ids" in inputs and inputs["input_ids"].shape[1] > chunk:
        raise NotWatchableError(f"its attention is cut into chunks of {chunk:,} tokens, and a sample is longer")
    current = _Pass(watcher)
    hooks = [block.register_forward_hook(_shows_hidden(current, layer)) for layer, block in enumerate(blocks)]
    token = _PASS.set(current)
    try:
        with attention_by(hf, NAME):
            hidden = _last_hidden(hf, inputs)
    finally:
        _PASS.reset(token)
        for hook in hooks:
            hook.remove()
    if current.layer != len(blocks):
        raise NotWatchableError(f"{current.layer} of its {len(blocks)} layers show their attention")
    return hidden


def check(hf: PreTrainedModel, **inputs: Tensor) -> set[int]:
    """Compare a model's hidden states under `watch` with those of its own attention.

    Returns:
        The layers in which some weight goes to no token.

    Raises:
        NotWatchableError: the hidden states differ by more than rounding, so the shown attention is not the model's.
    """
    sunk = _Sunk()
    ours = watch(hf, sunk, **inputs).float()
    with own_attention(hf), torch.inference_mode():
        own = _last_hidden(hf, inputs).float()
    off = float((ours - own).abs().max() / own.abs().max())
    tolerance = _CHECK_TOLERANCE if hf.dtype == torch.float32 else 30 * _CHECK_TOLERANCE
    if not off <= tolerance:
        raise NotWatchableError(f"its hidden states differ from those of its own attention, by {off:.1g} of the largest")
    return sunk.layers


def layers_of(hf: PreTrainedModel) -> nn.ModuleList:
    """Return a model's layers: its first module list that is as long as the number of layers in its config.

    Raises:
        NotWatchableError: the model has no such list.
    """
    count = getattr(hf.config.get_text_config(), "num_hidden_layers", None)
    for module in hf.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise NotWatchableError(f"it has no list of {count} layers")


class _Sunk(Watcher):
    """Records the layers in which some weight goes to no token."""

    def __init__(self) -> None:
        self.layers: set[int] = set()

    def see_chunk(self, chunk: Chunk) -> None:
        self.layers |= {chunk.layer} if chunk.rest is not None else set()


def _last_hidden(hf: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    cache = {"use_cache": False} if "input_ids" in inputs else {}
    body = hf.base_model if "input_ids" in inputs else hf
    hidden: Tensor = body(**inputs, **cache)[0]
    return hidden


def _shows_hidden(current: _Pass, layer: int) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        if _PASS.get(None) is current:
            current.watcher.see_hidden(layer, output[0] if isinstance(output, tuple) else output)

    return hook
