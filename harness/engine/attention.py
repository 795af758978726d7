"""The attention function that an unmodified Hugging Face model calls, and attention without eviction.

The model runs with `use_cache=False`, without a mask function, and with all position ids 0, where RoPE changes nothing. The
function therefore receives unrotated q, k and v of the new tokens, and a backend computes the rest. The backend is a context
variable, because some model families don't pass keyword arguments on to their attention.

At position 0, RoPE changes no number but launches ten kernels in every layer. The rotary functions are identified by their names
in the model's files. A probe run at load decides whether they can be skipped.

A forward pass changes no state that threads share. `answered_by` sets context variables, which the config's attention
implementation and the rotary functions look up at every call. Forward passes of the same model in other threads are therefore not
affected. A compiler can't follow a context variable, so compiled code takes the config's own
implementation, and the rotary functions that `compiling` names.

Axis letters: B streams, H KV heads, G query heads of a KV head, N = B * H, T tokens, L keys, D head dim.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

NAME = "kv_bench"  # of the attention function in transformers' registry

_ROTARY = re.compile(r"_?apply_\w*rotary\w*")  # transformers' names: apply_rotary_pos_emb, apply_rotary_emb and so on
_MAX_SCORES = 2**24  # held in memory at once by `causal`
_FUSED_QUERIES = 256  # queries per call, if the kernel holds no scores
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CUDA = {"cuda"}
_FLASH_DTYPES, _FLASH_MAX_DIM = (torch.bfloat16, torch.float16), 256  # supported by PyTorch's FlashAttention


class Terms(NamedTuple):
    """The parameters of a layer's attention besides q, k and v, as the model passed them."""

    scaling: float
    sliding_window: int | None = None  # tokens that a query sees, its own included
    softcap: float | None = None  # score = softcap * tanh(score / softcap)
    sink_logits: Tensor | None = None  # a learned logit per query head that joins the softmax without a value. [H * G]


class Backend(Protocol):
    """Computes the attention of a model's layers."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Compute the attention of one layer. [B, Q, T, D], [B, H, T, D], [B, H, T, Dv] -> [B, Q, T, Dv]."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,  # sixth parameter, as in transformers: wrappers pass it by position
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers."""
    terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    if s_aux is None and getattr(module.config, "zero_sink", False):  # softmax off by one is a sink logit of 0
        terms = terms._replace(sink_logits=query.new_zeros(query.shape[1]))
    layer: Any = module.layer_idx
    attend = _opaque if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, layer, *terms), None


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Compute the attention of one layer by the current backend. Inputs as in `Backend.attend` -> [B, T, Q, Dv]."""
    terms = Terms(scaling, sliding_window, softcap, sink_logits)
    return BACKEND.get().attend(layer, query, keys, values, terms).transpose(1, 2).contiguous()


def _empty_answer(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    """Return an empty tensor with the shape and dtype of the result of `_attend`, for the compiler."""
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])


@contextmanager
def answered_by(backend: Backend, stand_in: StandIn | None = None) -> Iterator[None]:
    """Let a backend compute the attention of forward passes in this context.

    Args:
        stand_in: replaces the rotary functions of models (`RotaryFunctions`); none are replaced when None.
    """
    backends, names, stand_ins = BACKEND.set(backend), _IMPLEMENTATION.set(NAME), _Skippable.current.set(stand_in)
    try:
        yield
    finally:
        BACKEND.reset(backends)
        _IMPLEMENTATION.reset(names)
        _Skippable.current.reset(stand_ins)


@contextmanager
def implemented_by(name: str) -> Iterator[None]:
    """Let a registered attention function, or `eager`, compute the attention of forward passes in this context."""
    token = _IMPLEMENTATION.set(name)
    try:
        yield
    finally:
        _IMPLEMENTATION.reset(token)


def forward(
    hf: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    backend: Backend,
    keep: Tensor | int,
    stand_in: StandIn | None = None,
) -> Tensor:
    """Run a model's forward pass, with attention and rotary functions as in `answered_by`. -> logits of the tokens to keep."""
    with answered_by(backend, stand_in):
        out = hf(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep)
    logits: Tensor = out.logits
    return logits


def _implementation(config: PreTrainedConfig) -> str | None:
    """Return the name of the attention function: the current context's, or else the config's own."""
    own: str | None = config._attn_implementation_internal
    return own if torch.compiler.is_compiling() else _IMPLEMENTATION.get() or own


BACKEND: ContextVar[Backend] = ContextVar("backend")  # of the current forward pass
_IMPLEMENTATION: ContextVar[str | None] = ContextVar("implementation", default=None)  # None: that of the model's config
_of_config: Any = PreTrainedConfig._attn_implementation
PreTrainedConfig._attn_implementation = property(_implementation, _of_config.fset)  # type: ignore[method-assign, assignment]
AttentionInterface.register(NAME, _attention)
# `_attend` as an operation that a compiler does not trace. The graph need not know that the backend writes to its cache: data
# dependencies decide the order of layers.
_opaque = torch.library.custom_op(
    "kv_bench::attend",
    _attend,
    mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, int layer, float scaling, int? sliding_window, float? softcap, "
    "Tensor? sink_logits) -> Tensor",
)
_opaque.register_fake(_empty_answer)


def unchanged(query: Tensor, keys: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stand-in for a function that rotates queries and keys."""
    return query, keys


def contiguous(query: Tensor, keys: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stand-in for a function that returns rotated queries and keys as contiguous tensors, as partial RoPE does."""
    return query.contiguous(), keys.contiguous()


STAND_INS = (unchanged, contiguous)
StandIn = Callable[..., tuple[Tensor, Tensor]]


class _Skippable:
    """A rotary function in a model's file, which a stand-in replaces in contexts that skip it."""

    current: ClassVar[ContextVar[StandIn | None]] = ContextVar("stand_in", default=None)
    compiled: ClassVar[StandIn | None] = None  # for compiled code

    def __init__(self, own: Callable[..., Any]) -> None:
        functools.update_wrapper(self, own)
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stand_in = _Skippable.compiled if torch.compiler.is_compiling() else _Skippable.current.get()
        return self._own(*args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)


@dataclass(frozen=True)
class RotaryFunctions:
    """Functions by which a model's layers rotate queries and keys.

    Attributes:
        places: Python module, name in the module, and function.
        stand_in: function that can replace the rotary functions (`answered_by`); None if they must run.
    """

    places: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = ()
    stand_in: StandIn | None = None

    def __post_init__(self) -> None:
        """Make the functions replaceable where the model's layers call them."""
        for module, name, function in self.places:
            if not isinstance(vars(module)[name], _Skippable):
                setattr(module, name, _Skippable(function))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Skip the rotary functions in code that is compiled in the meantime, in all threads."""
        _Skippable.compiled = self.stand_in
        try:
            yield
        finally:
            _Skippable.compiled = None


def rotary_functions(model: nn.Module) -> tuple[tuple[ModuleType, str, Callable[..., Any]], ...]:
    """Find the RoPE functions in the files of a model's layers, by their names. Returns (module, name, function) of each."""
    files = dict.fromkeys(sys.modules[type(layer).__module__] for layer in model.modules())
    named = ((file, name, value) for file in files for name, value in vars(file).items() if _ROTARY.fullmatch(name))
    return tuple((file, name, value) for file, name, value in named if callable(value))


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same numbers (0 equals -0) in the same layout."""
    layouts = [[step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (a, b)]
    return a.dtype == b.dtype and bool(a.equal(b)) and layouts[0] == layouts[1]


def weights(scores: Tensor, terms: Terms, heads: int, visible: Tensor | None = None) -> Tensor:
    """Compute the softmax over the keys, in float32 or wider. [N, G, L] -> [N, G, L].

    Args:
        scores: scaled dot products, rows ordered (stream, head).
        terms: softcap and sink logits are applied.
        heads: H, which arranges the sink logits.
        visible: keys that may be attended; all when None. Broadcasts to [N, G, L], bool.
    """
    if scores.dtype.itemsize < 4:
        scores = scores.float()
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if terms.sink_logits is None:
        return torch.softmax(scores, -1)
    sink = terms.sink_logits.to(scores.dtype).view(1, heads, -1, 1)
    sink = sink.expand(scores.shape[0] // heads, -1, -1, -1).reshape(scores.shape[0], -1, 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]


def logits_of(scores: Tensor, terms: Terms) -> Tensor:
    """Return the inputs of the softmax: scores after the softcap. Any shape; float32 or wider."""
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    return scores if terms.softcap is None else torch.tanh(scores / terms.softcap) * terms.softcap


def causal(query: Tensor, keys: Tensor, values: Tensor, terms: Terms, padding: Tensor | None = None) -> Tensor:
    """Compute causal attention of the last T of L tokens, in chunks of queries.

    Args:
        query: rotated. [B, H, G, T, D].
        keys: rotated. [B, H, L, D].
        values: [B, H, L, Dv].
        padding: number of padding tokens at the start of each stream; none when None. Their output is finite but
            meaningless. [B] int64.

    Returns:
        [B, H, G, T, Dv], dtype of the query.
    """
    tokens, length, group = query.shape[3], keys.shape[2], query.shape[2]
    is_standard = padding is None and terms == Terms(terms.scaling)
    if group > 1 and _needs_equal_heads(query, values, terms, is_standard):
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return causal(query.flatten(1, 2)[:, :, None], keys, values, terms, padding).view(*query.shape[:4], -1)
    if is_standard and (tokens == length or query.device.type in _CUDA):
        flat, mask = query.flatten(1, 2), None if tokens == length else _lower_right(tokens, length)
        out = scaled_dot_product_attention(
            flat, keys, values, mask, is_causal=mask is None, scale=terms.scaling, enable_gqa=flat.shape[1] > keys.shape[1]
        )
        return out.view(*query.shape[:4], values.shape[3])
    if is_standard and can_fuse(query, values, terms):
        return _past_and_own(query, keys, values, terms.scaling)
    rows = max(1, _MAX_SCORES // (query.shape[:3].numel() * length))
    if terms.softcap is None and terms.sink_logits is None:
        rows = max(rows, min(tokens, _FUSED_QUERIES))
    chunks = [
        _causal_chunk(query[:, :, :, t : t + rows], keys, values, length - tokens + t, terms, padding)
        for t in range(0, tokens, rows)
    ]
    return torch.cat(chunks, 3)


def can_fuse(query: Tensor, values: Tensor, terms: Terms) -> bool:
    """Return whether `fused_attention` computes this attention."""
    is_standard = terms.softcap is None and terms.sink_logits is None
    return is_standard and query.device.type == "cpu" and query.shape[-1] == values.shape[-1]


def fused_attention(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention by PyTorch's fused kernel for CPUs, which also returns the log-sum-exp.

    Args:
        query: rotated. [B, H, G, T, D].
        keys: rotated. [B, H, L, D].
        values: [B, H, L, D].
        mask: added to the scores; None for no mask. [G * T, L].

    Returns:
        [B, H, G, T, D], and the log-sum-exp of the scaled scores, [B, H, G, T], float32 or wider.
    """
    shape = query.shape[2:4]
    out, log_sum = _FUSED(query.flatten(2, 3), keys, values, 0.0, False, attn_mask=mask, scale=scaling)
    return out.unflatten(2, shape), log_sum.unflatten(2, shape)


def _past_and_own(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """`causal` on CPUs: merge attention to the L - T tokens before the block and attention to the block by log-sum-exps.

    Neither part needs a mask in memory, and the fused kernel skips half of the block's own scores.
    """
    past, group = keys.shape[2] - query.shape[3], query.shape[2]
    before, before_sum = fused_attention(query, keys[:, :, :past], values[:, :, :past], scaling)
    own_keys, own_values = (x[:, :, past:].repeat_interleave(group, 1) for x in (keys, values))
    own, own_sum = _FUSED(query.flatten(1, 2), own_keys, own_values, 0.0, True, scale=scaling)
    share = torch.sigmoid(own_sum.view_as(before_sum) - before_sum)[..., None]
    return before.to(share.dtype).lerp(own.view_as(before).to(share.dtype), share).to(query.dtype)


def _lower_right(tokens: int, length: int) -> Tensor:
    """Return the causal mask of the last T of L tokens, in the form that FlashAttention supports."""
    from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler, which takes a second

    return causal_lower_right(tokens, length)


def _needs_equal_heads(query: Tensor, values: Tensor, terms: Terms, is_standard: bool) -> bool:
    """Return whether a fused CUDA kernel supports this call only if there are as many KV heads as query heads.

    FlashAttention supports groups of query heads, but only 16-bit dtypes and causal masks. The memory-efficient kernel supports
    all masks and float32, but no groups (up to PyTorch 2.13; `sdp_utils.cpp`). cuDNN may be off. If no kernel supports a call,
    PyTorch computes all scores.
    """
    flash = is_standard and query.dtype in _FLASH_DTYPES and query.shape[4] == values.shape[3] <= _FLASH_MAX_DIM
    return query.device.type in _CUDA and terms.softcap is None and terms.sink_logits is None and not flash


def _causal_chunk(query: Tensor, keys: Tensor, values: Tensor, first: int, terms: Terms, padding: Tensor | None) -> Tensor:
    """Compute causal attention of the queries at positions `first`, `first + 1`, ..."""
    tokens = query.shape[3]
    low = 0 if terms.sliding_window is None else max(0, first - terms.sliding_window + 1)
    keys, values = keys[:, :, low : first + tokens], values[:, :, low : first + tokens]
    age = torch.arange(first, first + tokens, device=query.device)[:, None] - torch.arange(
        low, first + tokens, device=query.device
    )
    visible = age >= 0 if terms.sliding_window is None else (age >= 0) & (age < terms.sliding_window)
    if padding is not None:  # a padding query attends to itself, because softmax over no keys is NaN
        token = torch.arange(low, first + tokens, device=query.device) >= padding[:, None, None]  # [B, 1, L]
        visible = ((visible & token) | (age == 0))[:, None, None]  # [B, 1, 1, T, L]
    return attend_where(visible, query, keys, values, terms)


def attend_where(visible: Tensor, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
    """Compute attention to the visible keys, at least one per query.

    Args:
        visible: broadcasts to [B, H, G, T, L], bool. The sliding window of `terms` is not applied.
        query: rotated. [B, H, G, T, D].
        keys: rotated. [B, H, L, D].
        values: [B, H, L, Dv].

    Returns:
        [B, H, G, T, Dv], dtype of the query.
    """
    streams, heads, group, tokens, _ = query.shape
    if terms.softcap is None and terms.sink_logits is None:
        flat, mask = query.flatten(1, 2), visible
        if visible.dim() > 2:  # a mask that differs by head needs an entry for each query head
            by_head = visible.shape[1] > 1 or visible.shape[2] > 1
            mask = visible.expand(-1, *query.shape[1:3], -1, -1).flatten(1, 2) if by_head else visible[:, 0]
        out = scaled_dot_product_attention(flat, keys, values, mask, scale=terms.scaling, enable_gqa=group > 1)
        return out.view(streams, heads, group, tokens, -1)
    scores = torch.einsum("bhgtd,bhld->bhgtl", query * terms.scaling, keys)
    if terms.sink_logits is not None:  # one logit per row
        terms = terms._replace(sink_logits=terms.sink_logits.repeat_interleave(tokens))
    rows = visible.expand(scores.shape).flatten(0, 1).flatten(1, 2)  # [N, G * T, L]
    mass = weights(scores.flatten(0, 1).flatten(1, 2), terms, heads, rows).view(scores.shape)
    return torch.einsum("bhgtl,bhld->bhgtd", mass.to(values.dtype), values)
