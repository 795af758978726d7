"""Replay: keep what a keep map says, so that any policy's choices can be measured again, or edited and then measured.

The file is a table of evictions, as `bench show kept RECORD --replay FILE` writes it: for every layer, KV head and position, the
step after which the token was evicted, and for tokens that were never evicted the number of steps. It holds one stream; all
streams of a batch replay it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.tables import content_of, sha256_of
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Replay(Policy):
    """Keep the tokens that another policy kept. After the end of the map, evict the oldest token."""

    file: str  # table of evictions, relative to the current directory
    sha256: str | None = None  # of the file; `bind` fills it in, so that a record says which table it replayed

    def bind(self, capacity: int) -> Self:
        """Read the file, and check that its map is of this capacity."""
        sha256 = sha256_of(self.file, self.sha256)
        capacities = _table(self.file)["capacities"]
        if capacity not in capacities:
            raise ValueError(f"{self.file} was taken at capacity {' and '.join(map(str, capacities))}, not {capacity}")
        return replace(self, sha256=sha256)

    def importance(self, view: CacheView) -> Tensor:
        """The step after which the token is evicted. [B, H, S] float32."""
        assert self.sha256 is not None, "bind first"
        evicted = _evicted(self.file, self.sha256, view.rank.device)
        layers, heads, steps = evicted.shape
        if view.num_layers != layers or view.rank.shape[1] > heads:
            shown = f"{view.num_layers} layers of {view.rank.shape[1]} KV heads"
            raise ValueError(f"{self.file} was taken from a model with {layers} layers of {heads} KV heads, not {shown}")
        in_map = evicted[view.layer, view.head, view.position.clamp(0, steps - 1)]
        return in_map.masked_fill(view.position >= steps, steps)


@cache  # for as long as the process lives: a captured CUDA graph reads it
def _evicted(file: str, sha256: str, device: torch.device) -> Tensor:
    """The step after which each token is evicted. Moved to the device once. [layers, heads, positions] float32."""
    sha256_of(file, sha256)
    evicted: Tensor = _table(file)["evicted"]
    return evicted.to(device, torch.float32)  # exact up to 2^24 steps


def _table(file: str) -> dict[str, Any]:
    """The content of the file: "evicted", [layers, heads, positions] int32, and "capacities", a list of integers."""
    content = content_of(file)
    try:
        table: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        if table["evicted"].dim() == 3 and table["evicted"].dtype == torch.int32 and all(c >= 1 for c in table["capacities"]):
            return table
    except Exception:  # torch names no type for what a damaged file may raise
        pass
    raise ValueError(f"{file} is no table of evictions; 'bench show kept RECORD --replay FILE' writes one")
