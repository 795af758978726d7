"""A model's size from its config: enough to compute the size of its caches without loading weights."""

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
    """The sizes that decide what a model costs to run."""

    heads: int  # KV heads per layer
    queries: int  # query heads per layer
    head_dim: int  # of K and of V
    parameters: int  # approximate number
    windows: tuple[int | None, ...]  # for every layer, the tokens that a query sees, itself included; None if all

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    def kv_bytes(self, capacity: int, streams: int, itemsize: int, codec: Codec | None = None) -> int:
        """Bytes of a cache's K/V slots: `capacity + 1` per layer, or the sliding window if that is smaller."""
        slots = [capacity + 1 if window is None else min(capacity + 1, window) for window in self.windows]
        if codec is not None:
            return streams * self.heads * sum(codec.allocated(n, self.head_dim, self.head_dim, itemsize) for n in slots)
        return 2 * streams * self.heads * self.head_dim * itemsize * sum(slots)

    def state_bytes(self, policy: Policy, slots: int, capacity: int, number_bytes: int, grows: bool) -> int:
        """Bytes that a stream's cache takes beside K and V: ranks, positions, free slots and statistics.

        Args:
            policy: not yet bound.
            slots: of each KV head, but in layers whose sliding window is smaller.
            capacity: tokens per KV head kept between steps.
            number_bytes: bytes of a statistic's number.
            grows: nothing is evicted any more, so that statistics go unless they last.

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
        """The largest capacity that `size` bytes of K/V slots allow one stream; 0 if there is none.

        `spare` slots are allocated beyond the capacity. `state` says how many bytes beside K and V count at a capacity.
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
    """The shape in a transformers config; None if the model has no attention."""
    text = config.get_text_config()
    try:
        queries, hidden, layers = text.num_attention_heads, text.hidden_size, text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or hidden // queries
        heads = getattr(text, "num_key_value_heads", None) or queries
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        inners = sum(inner) if isinstance(inner, list) else layers * inner  # Gemma 3n has one for every layer
        embedded = getattr(text, "vocab_size", 0)
        parameters = hidden * (layers * 2 * head_dim * (queries + heads) + 3 * inners + embedded)
        return ModelShape(heads, queries, head_dim, parameters, _windows(text, layers))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None


def readable_shape(model: str, revision: str | None, gguf_file: str | None = None) -> ModelShape | None:
    """The shape of a model from its config, without its weights; None if neither a directory, the cache nor the hub has it.

    Raises:
        UserError: there is a config, but it can't be read.
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
    """The sliding window of every layer."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
