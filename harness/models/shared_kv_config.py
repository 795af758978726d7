"""The config of a transformer whose layers may read the K and V of an earlier layer.

Sources: CLA, Brandon et al. 2024, arXiv:2405.12981 (adjacent layers share); YOCO, Sun et al. 2024, arXiv:2405.05254 (the upper
half reads one cache).
Differs: the layers are those of Qwen3, with norms of queries and keys.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, Qwen3Config

from kvbench.harness.engine.variants.lckv import sources_of

KV_LAYERS = "kv_layers"  # the setting


class SharedKVConfig(Qwen3Config):
    """Qwen3 with `kv_layers`: for every layer, the one whose K and V it reads. None: each has its own."""

    model_type = "qwen3_shared_kv"
    kv_layers: list[int] | None = None


def kv_sources(config: Any) -> list[int]:
    """Return for each layer the index of the layer whose K and V it reads, according to the config of a transformers decoder.

    `num_kv_shared_layers` (Gemma) counts layers at the end that read the last layer of their kind before them.

    Raises:
        ValueError: a layer reads one that does not come before it, or that reads another itself.
    """
    layers: int = config.num_hidden_layers
    if getattr(config, "reads_later_layers", False):
        return sources_of(config)
    sources = getattr(config, KV_LAYERS, None)
    if sources is not None:
        _check(sources, layers)
        return list(sources)
    own = layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or [None] * layers
    last = {kinds[layer]: layer for layer in range(own)}
    return [layer if layer < own else last.get(kinds[layer], layer) for layer in range(layers)]


def _check(sources: list[int], layers: int) -> None:
    if len(sources) != layers:
        raise ValueError(f"{KV_LAYERS} names {len(sources)} layers, expected num_hidden_layers = {layers}")
    for layer, source in enumerate(sources):
        if source > layer:
            raise ValueError(
                f"{KV_LAYERS}: layer {layer} reads the K and V of layer {source}, which come after it (as in LCKV): "
                "of model_type kv_bench_lckv they may"
            )
        if source < 0 or sources[source] != source:
            raise ValueError(f"{KV_LAYERS}: layer {layer} reads layer {source}, which has no K and V of its own")


AutoConfig.register(SharedKVConfig.model_type, SharedKVConfig)
