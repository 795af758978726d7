"""Wraps an unmodified Hugging Face model so that the decode loop can drive it.

Axis letters: B streams, T tokens, V vocabulary, L layers, H KV heads, G query heads of a KV head, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

from kvbench.harness.core.codec import Codec
from kvbench.harness.engine import probes
from kvbench.harness.engine.attention import NAME, Backend, RotaryFunctions, answered_by, forward
from kvbench.harness.engine.kernel_interface import fused_logits
from kvbench.harness.engine.rotary import LONGEST_STREAM
from kvbench.harness.engine.slots import LayerShape


class UnsupportedModelError(ValueError):
    """This model can't be driven exactly; the message says why."""


@dataclass
class Model:
    """A model the decode loop can drive.

    Attributes:
        hf: the Hugging Face model; `attention.forward` lets a backend compute its attention.
        layers: the shape of each layer, for its cache.
        training_length: longest position seen in training, in tokens; None if the config does not say.
        check: result of the self-check, in units of rounding error; None if it did not run.
        idle_rotary: rotary functions of the model, if they leave queries and keys unchanged at position 0; otherwise none.
        learned_positions: positions are learned embeddings, as in GPT-2, so a cached token can't move to another position.
    """

    hf: PreTrainedModel
    layers: list[LayerShape] = field(default_factory=list)
    training_length: int | None = None
    check: float | None = None
    idle_rotary: RotaryFunctions = field(default_factory=RotaryFunctions)
    learned_positions: bool = False
    _outputs: dict[int, Tensor] | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the first weights, on which token ids are expected."""
        return self.hf.device

    @property
    def devices(self) -> list[torch.device]:
        """Devices of the layers, each once."""
        return list(dict.fromkeys([self.device, *(shape.device or self.device for shape in self.layers)]))

    @property
    def may_capture(self) -> bool:
        """Whether a CUDA graph can hold a step: one device computes it, and no input depends on the position in the stream."""
        return len(self.devices) == 1 and not self.learned_positions

    @property
    def longest(self) -> int:
        """Maximum length of a stream, in tokens."""
        return self.training_length or 0 if self.learned_positions else LONGEST_STREAM

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and therefore of K and V."""
        return self.hf.dtype

    def kv_bytes(self, capacity: int, streams: int = 1, codec: Codec | None = None) -> int:
        """Return the bytes of a cache's K/V slots: `capacity + 1` slots per layer and KV head, fewer under a sliding window."""
        return streams * sum(s.kv_bytes((s.kept(capacity) or 0) + 1, self.dtype, codec) for s in self.layers)

    def output_of(self, layer: int) -> Tensor | None:
        """Return the output projection of a layer's attention, by KV head; None if the layer has none. [H, G, E, Dv]."""
        if self._outputs is None:
            self._outputs = probes.output_projections(self.hf)
        shape, weight = self.layers[layer], self._outputs.get(layer)
        return None if weight is None else weight.unflatten(1, (shape.heads, shape.group, -1)).permute(1, 2, 0, 3)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the model that a record stores."""
        return {
            "model_type": str(self.hf.config.model_type),
            "training_length": self.training_length,
            "vocab_size": getattr(self.hf.config.get_text_config(), "vocab_size", None) or None,
            "self_check": self.check,
            "kv_shapes": self._kv_shapes(),
        }

    def _kv_shapes(self) -> list[dict[str, Any]]:
        """Return the shapes of K and V, by kind of layer, so that a reader of the record can compute their bytes."""
        kinds = Counter((s.heads, s.key_dim, s.value_dim, s.sliding_window) for s in self.layers)
        names = ("heads", "key_dim", "value_dim", "sliding_window")
        return [{"layers": count, **dict(zip(names, kind, strict=True))} for kind, count in kinds.items()]

    def __call__(self, tokens: Tensor, backend: Backend, keep: Tensor | int = 0, positions: Tensor | None = None) -> Tensor:
        """Return the logits of a block.

        Args:
            tokens: [B, T] int64.
            backend: computes every layer's attention.
            keep: indices of the tokens whose logits to return, or the number of last tokens; 0 for all tokens.
            positions: positions in the stream, used if positions are learned; 0, 1, ... when None. [B, T] int64.

        Returns:
            [B, T or kept tokens, V], the model's dtype.
        """
        compiled = _COMPILED.get()
        if compiled is not None and tokens.shape[1] == 1 and isinstance(keep, int):
            with answered_by(backend, self.idle_rotary.stand_in), self.idle_rotary.compiling():
                return fused_logits(compiled, tokens)
        # The backend applies RoPE, so models with RoPE run at position 0.
        placed = self._learned_positions(tokens, positions) if self.learned_positions else torch.zeros_like(tokens)
        return forward(self.hf, tokens, placed, backend, keep, self.idle_rotary.stand_in)

    def _learned_positions(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the positions in the stream that are passed to a model with learned positions. [B, T]."""
        if positions is None:
            return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return positions.clamp(max=self.longest - 1)  # tokens after the end of a stream are invalid

    @contextmanager
    def fused_steps(self, streams: int) -> Iterator[None]:
        """Read single tokens with the compiled model in this context. The logits change by rounding only.

        Use it to warm up and to capture a CUDA graph. Outside of a graph, the host takes longer than the compiled kernels.

        Args:
            streams: B of the steps. The first use of each B compiles the model, which takes seconds per layer.

        Raises:
            FusedStepError: on entry, if the model can't be compiled.
        """
        tokens = torch.zeros(streams, 1, dtype=torch.int64, device=self.device)
        own = self.hf.config._attn_implementation == NAME  # compiled code reads the config
        compiled = _COMPILED.set(self.hf if own else with_our_attention(private_copy(self.hf)))
        try:
            with torch.inference_mode():
                self(tokens, probes.Probe())
            yield
        finally:
            _COMPILED.reset(compiled)


_COMPILED: ContextVar[PreTrainedModel | None] = ContextVar("compiled", default=None)  # the model whose steps are fused


def private_copy(hf: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and config, and share its weights. Attributes set on the copy do not affect the model."""
    shared = {id(tensor): tensor for tensor in (*hf.parameters(), *hf.buffers())}
    copied = deepcopy(hf, shared)  # drops the compiled calls of `Module.compile`
    for module in list(copied.modules()):
        if _is_compiled_function(vars(module).get("forward")):
            del module.forward
        for name, child in module.named_children():
            if isinstance(child, OptimizedModule):
                setattr(module, name, child._orig_mod)
    return copied


def random_tokens(hf: PreTrainedModel, streams: int, count: int, seed: int = 0) -> Tensor:
    """Return random tokens of a model's vocabulary. [B, count] int64."""
    vocabulary = hf.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (streams, count), generator=torch.Generator().manual_seed(seed)).to(hf.device)


def is_compiled(hf: PreTrainedModel) -> bool:
    """Return whether `torch.compile` compiled the model or one of its modules."""
    return any(
        isinstance(m, OptimizedModule) or m._compiled_call_impl is not None or _is_compiled_function(vars(m).get("forward"))
        for m in hf.modules()
    )


def _is_compiled_function(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable")


def with_our_attention(hf: PreTrainedModel) -> PreTrainedModel:
    """Route a model's attention to `attention.py` permanently."""
    hf.set_attn_implementation(NAME)
    return hf


def adopt(hf: PreTrainedModel, rope_length: int | None = None, shared: bool = False) -> Model:
    """Find the shape of a model's layers with probe runs, under the attention of `attention.py`.

    `selfcheck.check` later compares the adopted model with its own forward pass.

    Args:
        hf: any causal language model, in evaluation mode.
        shared: the model has other users and is not modified. Otherwise its attention is routed and its weights are frozen,
            permanently.
        rope_length: longest position + 1, in tokens, for RoPE types whose tables depend on it (dynamic, longrope). The
            tables for this length are used at all positions.

    Raises:
        UnsupportedModelError: the model can't be driven exactly; the message says why.
    """
    if reason := getattr(hf, "undrivable", None):  # a model class may declare a reason
        raise UnsupportedModelError(reason)
    if not shared:
        with_our_attention(hf.requires_grad_(False))
    if (kinds := probes.adaptive_rope(hf)) and rope_length is None:
        raise UnsupportedModelError(f"its RoPE ({', '.join(kinds)}) depends on the longest position: set model.rope_length")
    if shared and (rope_length is not None or is_compiled(hf)):
        hf = private_copy(hf)  # its RoPE tables are modified, and compiled code ignores the choice of attention
    length = getattr(hf.config.get_text_config(), "max_position_embeddings", None)
    try:
        with torch.inference_mode():
            layers, idle_rotary, learned = probes.layer_shapes(hf, rope_length)
            probes.refuse_shared_kv(hf)
    except LookupError as error:
        raise UnsupportedModelError(str(error) if hf._can_set_attn_implementation() else probes.NOT_ROUTED) from None
    known = length if isinstance(length, int) else None
    if learned and known is None:
        raise UnsupportedModelError("its positions are learned, and its config does not say how many there are")
    return Model(hf, layers, known, idle_rotary=idle_rotary, learned_positions=learned)
