"""Reset: when the cache is full, empty it and read the first and the newest tokens again.

Source: llama.cpp's "infinite text generation via context swapping" (examples/main/main.cpp, 2023): of the context, `n_keep` first
tokens and the newer half of the others are read again. With `reread: 0` no newer token is read again. StreamingLLM (Xiao et al.
2023, arXiv:2309.17453) avoids such resets.
Differs: the first tokens are read again, too. They depend on no other token, so their keys and values are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Reset(Policy):
    """Full attention until `capacity + 1` tokens are cached; then empty the cache, and read the first and newest tokens again."""

    caches: ClassVar[bool] = False  # in slots that evict: its decoder empties them all at once

    sinks: int = 0  # first tokens of the stream, read again at each reset
    reread: int | None = None  # newest tokens, read again at each reset; half of what the sinks leave when None

    def bind(self, capacity: int) -> Self:
        """Resolve how many tokens are read again."""
        reread = (capacity - self.sinks) // 2 if self.reread is None else self.reread
        if self.sinks < 0 or reread < 0 or self.sinks + reread > capacity:
            raise ValueError(f"capacity {capacity} can't hold sinks {self.sinks} + reread {reread}")
        return replace(self, reread=reread)

    def importance(self, view: CacheView) -> Tensor:
        """Newer tokens are more important. Unused, since no single token is evicted. [B, H, S] float32."""
        return view.position.float()
