"""Sizes of a model, read from its config, to compute the size of its caches without loading weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from kvbench.harness.core.codec import Codec
from kvbench.harness.core.packaged import PACKAGED
from kvbench.harness.models.config import read_config
from kvbench.harness.models.hub import RANDOM, is_here, model_directory, quiet
from kvbench.policies import HeadSizes, Policy


@dataclass(frozen=True)
class ModelShape:
    """Sizes that determine the cost of running a model."""

    heads: int  # KV heads per layer
    queries: int  # query heads per layer
    head_dim: int  # dimension of a key and of a value
    parameters: int  # approximate number of parameters
    windows: tuple[int | None, ...]  # sliding window of every layer in tokens, the query's own included; None: unbounded

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    def kv_bytes(self, capacity: int, streams: int, itemsize: int, codec: Codec | None = None) -> int:
        """Return the bytes of a cache's K/V slots: `capacity + 1` slots per layer, or the sliding window if smaller."""
        slots = [capacity + 1 if window is None else min(capacity + 1, window) for window in self.windows]
        if codec is not None:
            return streams * self.heads * sum(codec.allocated(n, self.head_dim, self.head_dim, itemsize) for n in slots)
        return 2 * streams * self.heads * self.head_dim * itemsize * sum(slots)

    def state_bytes(self, policy: Policy, slots: int, capacity: int, number_bytes: int, grows: bool) -> int:
        """Return the bytes of a stream's cache besides K and V: ranks, positions, free slots and statistics.

        Args:
            policy: policy that is not yet bound.
            slots: slots of each KV head in layers without a smaller sliding window.
            capacity: tokens per KV head kept between steps.
            number_bytes: bytes of a statistic's number.
            grows: whether the cache grows without further eviction, so that only lasting statistics are kept.

        Raises:
            ValueError: the policy can't serve the capacity.
        """
        total = 0
        for window in self.windows:
            kept = capacity if window is None else min(capacity, window - 1)
            sizes = HeadSizes(self.queries // self.heads, self.head_dim, self.head_dim)
            held = {s: prod(s.shape(sizes)) for s in policy.bind(kept).statistics if s.lasts or not grows}
            of_slot = 16 + number_bytes * sum(n for s, n in held.items() if s.per == "slot")
            of_head = 8 + 8 * sum(n for s, n in held.items() if s.per == "head")
            total += self.heads * ((slots - capacity + kept) * of_slot + of_head)
        return total

    def capacity_within(
        self, size: int, itemsize: int, spare: int = 1, codec: Codec | None = None, state: Callable[[int], int] | None = None
    ) -> int:
        """Return the largest capacity of one stream that fits into `size` bytes of K/V slots; 0 if none fits.

        Args:
            spare: slots that are allocated beyond the capacity.
            state: function of the capacity that returns the bytes besides K and V to count.
        """
        of_slot = self.head_dim * itemsize if codec is None else codec.bytes_of(self.head_dim, itemsize)
        low, high = 0, size // (2 * self.heads * of_slot) + 1
        while high - low > 1:
            middle = (low + high) // 2
            taken = self.kv_bytes(middle + spare - 1, 1, itemsize, codec) + (0 if state is None else state(middle))
            fits = taken <= size
            low, high = (middle, high) if fits else (low, middle)
        return low


def shape_of(config: Any) -> ModelShape | None:
    """Return the shape in a transformers config; None if the model has no attention."""
    text = config.get_text_config()
    try:
        queries, hidden, layers = text.num_attention_heads, text.hidden_size, text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or hidden // queries
        heads = getattr(text, "num_key_value_heads", None) or queries
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        inners = sum(inner) if isinstance(inner, list) else layers * inner  # Gemma 3n has a size for every layer
        embedded = getattr(text, "vocab_size", 0)
        parameters = hidden * (layers * 2 * head_dim * (queries + heads) + 3 * inners + embedded)
        return ModelShape(heads, queries, head_dim, parameters, _windows(text, layers))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None


def readable_shape(model: str, revision: str | None, gguf_file: str | None = None) -> ModelShape | None:
    """Return the shape of a model from its config alone; None if the config is in no directory, not cached and not on the hub.

    Raises:
        UserError: the config exists but can't be read.
    """
    quiet()
    directory = Path(model).expanduser()
    if (directory / "config.json").exists() and gguf_file is None:
        return shape_of(read_config(directory))
    if model in PACKAGED:
        shape = PACKAGED[model].shape
        return None if shape is None else shape_of(read_config(model_directory(RANDOM + shape, None, False)))
    if gguf_file is not None or is_here(model):
        return shape_of(read_config(model_directory(model, revision, False, gguf_file)))
    try:
        return shape_of(AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False))
    except (OSError, ValueError):
        return None


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of every layer."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
