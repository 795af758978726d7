"""A model's size from its config: enough to compute the size of its caches without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide what a model costs to run.

    Attributes:
        heads: KV heads per layer.
        head_dim: of K and of V.
        parameters: approximate number.
        windows: for every layer, the tokens that a query sees, itself included; None if all.
    """

    heads: int
    head_dim: int
    parameters: int
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    def kv_bytes(self, capacity: int, streams: int, itemsize: int) -> int:
        """Bytes of a cache's K/V slots: `capacity + 1` per layer, or the sliding window if that is smaller.

        Args:
            capacity: tokens kept between steps.
            streams: streams in the batch.
            itemsize: bytes per number.
        """
        slots = sum(capacity + 1 if window is None else min(capacity + 1, window) for window in self.windows)
        return 2 * streams * self.heads * self.head_dim * itemsize * slots


def shape_of(config: Any) -> ModelShape | None:
    """The shape in a transformers config; None if the model is not a decoder with attention."""
    text = config.get_text_config()
    try:
        queries, hidden, layers = text.num_attention_heads, text.hidden_size, text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or hidden // queries
        heads = getattr(text, "num_key_value_heads", None) or queries
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        layer = hidden * (2 * head_dim * (queries + heads) + 3 * inner)
        return ModelShape(heads, head_dim, layers * layer + text.vocab_size * hidden, _windows(text, layers))
    except (AttributeError, TypeError, ZeroDivisionError):
        return None


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
