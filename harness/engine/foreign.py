"""Decoder with somebody else's cache, which runs the unmodified model with transformers' attention.

Positions are counted here and passed explicitly, because a cache that evicts may not know how many tokens it has read. The cache
alone decides which tokens it keeps. The model rotates keys to their stream positions before they are cached.

Axis letters: B streams, T tokens, N tokens of a text, K tokens whose logits are returned, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from math import inf
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.presses import Press
from kvbench.harness.engine.attention import implemented_by
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.engine.stored import copied, storage_bytes, tensors_in

_NOT_OF_A_CACHE = (nn.Module, type)


class Hooks:
    """Hooks of a press, installed only while one decoder reads. The state of the press is kept for the decoder's next block.

    A press stores state in its own attributes, and indices of masked keys on the model's attention modules.
    """

    def __init__(self, policy: Press) -> None:
        self._press = policy.new_press()
        self.notes: list[tuple[Any, dict[str, Any]]] = []  # every press inside, and its attributes
        self._masked: list[Any] = []  # indices of masked keys, by attention module

    @contextmanager
    def on(self, hf: PreTrainedModel) -> Iterator[None]:
        """Install the hooks on the model in this context."""
        modules: list[Any] = [module for module in hf.modules() if hasattr(module, "layer_idx")]
        with self._press(hf):
            for press, attributes in self.notes:
                vars(press).update(attributes)
            for module, indices in zip(modules, self._masked, strict=False):
                module.masked_key_indices = indices
            try:
                yield
            finally:
                self.notes = [(press, dict(vars(press))) for press in _presses(self._press)]
                self._masked = [vars(module).pop("masked_key_indices", None) for module in modules]


def _presses(press: Any) -> Iterator[Any]:
    """Yield a press and the presses inside it."""
    yield press
    for value in vars(press).values():
        for inside in value if isinstance(value, list) else [value]:
            if hasattr(inside, "forward_hook"):
                yield from _presses(inside)


class ForeignDecoder:
    """Decoder with the cache of a contestant.

    Attributes:
        cache: cache that the model writes to.
        streams: B.
    """

    def __init__(self, model: Model, config: CacheConfig, streams: int = 1, method: Method = EAGER) -> None:
        """Create the cache.

        Raises:
            ValueError: transformers' own attention leaves out a part of the model.
        """
        assert isinstance(config.policy, Contestant)
        self.model, self.config, self.streams = model, config, streams
        self.cache = config.policy.new_cache(model.hf.config)
        self._loop = method.own_loop
        if not self._loop.attention:
            self._loop = self._loop._replace(attention=usual_attention(model.hf, config.policy))
        self._read = 0  # tokens of each stream
        self._coded_streams = streams  # number of streams in its codes, until it codes again
        self._hooks = Hooks(config.policy) if isinstance(config.policy, Press) else None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Read a block; token by token unless blocks are known to agree with single tokens.

        Reading token by token syncs `keep` with the host.

        Raises:
            ValueError: the streams are of unequal length, or longer than the cache.
        """
        if valid is not None:
            raise ValueError("streams of unequal length side by side, which somebody else's cache can't hold")
        if self._read == 0 and isinstance(self.config.policy, Press) and self.config.policy.cuts_prompts:
            raise ValueError("a press cuts what the first pass reads, and this task has no prompt: give it one, as `prompt: 256`")
        count = tokens.shape[1]
        if count == 1 or self._read + count <= self._loop.blocks:
            return self._forward(tokens, keep)
        wanted = range(count) if keep is None else keep.tolist()
        logits = {t: self._forward(tokens[:, t : t + 1]) for t in range(count)}
        return torch.cat([logits[t] for t in wanted], 1) if len(wanted) else logits[0][:, :0]

    def _forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Run the model's own forward pass over a block. [B, T] int64 -> [B, T or K, V]."""
        end = self._read + tokens.shape[1]
        if end > self.longest:
            raise ValueError(f"a stream of {end} tokens or more, but the cache ends at {self.longest:.0f}: raise max_cache_len")
        positions = torch.arange(self._read, end, device=tokens.device).expand(len(tokens), -1)
        hooked = nullcontext() if self._hooks is None else self._hooks.on(self.model.hf)
        with implemented_by(self._loop.attention), hooked:
            out = self.model.hf(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=0 if keep is None else keep,
            )
        self._read = end
        logits: Tensor = out.logits
        return logits

    @torch.inference_mode()
    def read_prompt(self, tokens: Tensor, block: int, once: bool = False) -> Tensor:
        """Read prompts in one pass, as `generate` does. [B, N] int64 -> logits after the last token, [B, V]."""
        return self._forward(tokens, torch.tensor([tokens.shape[1] - 1], device=tokens.device))[:, -1]

    def reserve(self, tokens: int) -> None:
        """Do nothing: the cache decides when to allocate."""

    @torch.inference_mode()
    def fork(self, streams: Sequence[int]) -> Self:
        """Return a decoder whose streams are copies of the given streams. The decoders share no cache.

        Raises:
            ValueError: the cache can't choose streams.
        """
        other = copy(self)
        other.cache, other._hooks, other.streams = copied(self.cache), deepcopy(self._hooks), len(streams)
        if list(streams) != list(range(self.streams)):
            if not self._reorders:
                raise ValueError("its cache holds more than keys and values, and has no reorder_cache of its own")
            index: Any = torch.tensor(streams, device=self.model.device)
            other._coded_streams = self._coded_streams if self._stale() else self.streams
            other.cache.reorder_cache(index)
        return other

    def _stale(self) -> list[Any]:
        """Return the codes of layers that were reordered and have coded nothing since. transformers does not reorder codes."""
        layers: list[Any] = self.cache.layers
        stale = [layer for layer in layers if getattr(layer, "_pending_beam_idx", None) is not None]
        return [[layer._quantized_keys, layer._quantized_values] for layer in stale]

    @property
    def _bytes_of_others(self) -> int:
        """Bytes of stale codes that belong to other streams; negative if there are more streams now than in the codes."""
        stale = storage_bytes(tensors_in(self._stale(), _NOT_OF_A_CACHE))
        return stale - stale * self.streams // self._coded_streams

    @property
    def _reorders(self) -> bool:
        """Whether `reorder_cache` reorders all tensors of a stream. transformers' own reorders keys and values of layers."""
        if self._hooks is not None and any(tensors_in(self._hooks, _NOT_OF_A_CACHE)):
            return False
        if type(self.cache).reorder_cache is not Cache.reorder_cache:
            return True
        known = [layer for layer in self.cache.layers if type(layer).reorder_cache is not CacheLayerMixin.reorder_cache]
        reached = [[layer.keys, layer.values] for layer in self._layers]
        reachable = {id(t) for t in tensors_in([known, reached], _NOT_OF_A_CACHE)}
        return all(t.ndim == 0 or id(t) in reachable for t in tensors_in(self.cache, _NOT_OF_A_CACHE))

    @property
    def _layers(self) -> list[Any]:
        """Layers that hold their keys as one tensor. Other layers have their own format."""
        layers: list[Any] = self.cache.layers
        return [layer for layer in layers if isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.ndim == 4]

    @property
    def longest(self) -> float:
        """Maximum length of a stream, in tokens; infinite if the cache grows or evicts."""
        return longest(self.cache)

    def held(self, positions: Sequence[int]) -> float | None:
        """Return 1.0 if all layers hold all tokens; otherwise None, because the kept tokens can't be observed."""
        return 1.0 if self.slots[0] == self._read else None

    @property
    def slots(self) -> tuple[float, float]:
        """(tokens held, tokens attended), averaged over layers. A quantized layer counts as holding all tokens."""
        lengths = [self._read if hasattr(layer, "_quantized_keys") else layer.keys.shape[2] for layer in self._layers] or [
            self._read
        ]
        return sum(min(n, self._read) for n in lengths) / len(lengths), sum(lengths) / len(lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for all tensors of the cache, without codes of streams that a fork left out."""
        return storage_bytes(tensors_in(self.cache, _NOT_OF_A_CACHE)) - self._bytes_of_others

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors of the cache, without slots that no token has filled yet."""
        tensors = {(t.data_ptr(), t.shape): t.nbytes for t in tensors_in(self.cache, _NOT_OF_A_CACHE)}
        free = (1 - min(1, self._read / layer.keys.shape[2]) for layer in self._layers if layer.keys.shape[2])
        sizes = (layer.keys.nbytes + layer.values.nbytes for layer in self._layers if layer.keys.shape[2])
        others = self._bytes_of_others
        return round(sum(tensors.values()) - others - sum(part * size for part, size in zip(free, sizes, strict=True)))

    @property
    def state_bytes(self) -> int:
        """0: somebody else's cache does not tell its state from its keys and values."""
        return 0


def longest(cache: Any) -> float:
    """Return the maximum length of a text in a cache of transformers, in tokens; infinite if it grows or evicts."""
    full = [layer for layer in cache.layers if not getattr(layer, "is_sliding", False)]
    return min((layer.max_cache_len for layer in full if hasattr(layer, "max_cache_len")), default=inf)


def usual_attention(hf: PreTrainedModel, policy: Contestant) -> str:
    """Return the requested attention; by default `sdpa` if the model family has it, otherwise `eager`.

    Raises:
        ValueError: transformers' attention leaves out a part of the model.
    """
    if hasattr(hf, "own_attention") or getattr(hf.config.get_text_config(), "zero_sink", False):
        raise ValueError("its attention is not transformers' own, so only our loop can read it with a cache")
    name = policy.attention or ("sdpa" if hf._supports_sdpa else "eager")
    with attention_by(hf, name):  # raises if the family does not have it
        return name
