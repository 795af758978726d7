"""Sources of layers: the layer whose K and V each layer reads, according to a model's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def kv_sources(config: Any) -> list[int]:
    """Return for each layer the index of the layer whose K and V it reads, according to the config of a transformers decoder.

    `kv_layers` lists the layers. `num_kv_shared_layers` (Gemma) counts layers at the end that read the last layer of their kind
    before them.

    Raises:
        ValueError: no order of layers can serve `kv_layers`; the message says why.
    """
    layers: int = config.num_hidden_layers
    named = getattr(config, "kv_layers", None)
    if named is not None:
        if why := why_unserved(named, layers):
            raise ValueError(why)
        return list(named)
    own = layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or [None] * layers
    last = {kinds[layer]: layer for layer in range(own)}
    return [layer if layer < own else last.get(kinds[layer], layer) for layer in range(layers)]


def why_unserved(sources: Sequence[int], layers: int) -> str:
    """Return the reason that layers can't read the K and V of these sources; empty if they can."""
    if len(sources) != layers:
        return f"kv_layers names {len(sources)} layers, expected num_hidden_layers = {layers}"
    for layer, source in enumerate(sources):
        if not 0 <= source < layers or sources[source] != source:
            return f"kv_layers: layer {layer} reads layer {source}, which has no K and V of its own"
        if source < layer and sources.index(source) < source:
            return f"kv_layers: layer {layer} reads layer {source}, which layers before that read: it must be their last reader"
    return ""
