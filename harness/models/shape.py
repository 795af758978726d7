"""What a model's config says of its size: enough to know what its caches take, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """What decides cost.

    Attributes:
        heads: KV heads of a layer.
        head_dim: of K and of V.
        parameters: about.
        windows: of every layer, the tokens that a query may see, itself included; None if all.
    """

    heads: int
    head_dim: int
    parameters: int
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.windows)

    def kv_bytes(self, capacity: int, streams: int, itemsize: int) -> int:
        """K/V slots of a cache, as `Model.kv_bytes` has them: `capacity + 1` a layer, a sliding window at most.

        Args:
            capacity: tokens kept between steps.
            streams: side by side.
            itemsize: bytes of a number.
        """
        slots = sum(capacity + 1 if window is None else min(capacity + 1, window) for window in self.windows)
        return 2 * streams * self.heads * self.head_dim * itemsize * slots


def shape_of(config: Any) -> ModelShape | None:
    """The shape that a config of transformers describes; None if it is not that of a decoder with attention."""
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
