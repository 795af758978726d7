"""Where RoPE puts the keys and queries of a cache, by position mode.

Axis letters: B streams, N rows of a layer, R rows of all layers, S slots, T tokens, P pairs of dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.harness.engine.plan import QueryFactors
from kvbench.harness.engine.rotary import LONGEST_STREAM, rotate
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode


class Placement:
    """RoPE of the layers of one `Slots`.

    Attributes:
        rotation: of the layers; None without RoPE.
        mode: where RoPE puts a cached token.
        limit: the largest distance of mode `clamped`, in tokens.
        max_position: bounds the positions that RoPE is asked for; the number of slots when None.
    """

    def __init__(self, slots: Slots, mode: PositionMode, limit: int) -> None:
        """slots: of the layers; mode, limit: see the attributes."""
        self._slots, self.rotation, self.mode, self.limit = slots, slots.shape.rotation, mode, limit
        self.max_position = {"stream": LONGEST_STREAM, "clamped": limit + 1}.get(mode)
        assert not slots.keys_rotated or (mode == "stream" and self.rotation is not None)
        if self.rotation is not None:
            self.rotation.prepare(slots.tensors.keys.dtype)

    @property
    def length(self) -> int:
        """Bounds the positions that RoPE is asked for."""
        return self.max_position or self._slots.num_slots + 1

    def of_block(self, ranks: Tensor, steps: Tensor) -> QueryFactors | None:
        """RoPE of a block's queries; None without RoPE. ranks, steps: [B, T] int64 -> [B, 1, 1, T, P]."""
        return None if self.rotation is None else self._factors(self._places(ranks, steps)[:, None, None])

    def of_step(self, ranks: Tensor, steps: Tensor) -> QueryFactors | None:
        """RoPE of one token's queries; None without RoPE. ranks, steps: [N] int64 -> [N, 1, P]."""
        if self.rotation is None:
            return None
        return self._factors(self._places(ranks.clamp(max=self._slots.num_slots), steps)[:, None])

    def of_keys(self, rows: Rows, steps: Tensor) -> Tensor | None:
        """RoPE that the cached keys still need; None if they need none.

        Args:
            rows: of one layer, or of all.
            steps: of the token that attends. [R] int64; of one layer, its rows are the first, as they are alike in every layer.

        Returns:
            [R, S, P] complex.
        """
        if self.rotation is None or self._slots.keys_rotated:
            return None
        if self.mode == "cache":
            at = rows.rank
        elif self.mode == "stream":
            at = rows.position.clamp(min=0)
        else:  # the query stands at `limit`, which bounds every distance
            at = self.limit - (steps[: len(rows.rank), None] - rows.position).clamp(0, self.limit)
        return self.rotation.factors(at, rows.keys.dtype, self.length)

    def kept(self, keys: Tensor, own: QueryFactors | None) -> Tensor:
        """New keys as the slots hold them. keys: [N, D]; own: RoPE of their tokens' queries, [N, 1, P]."""
        return rotate(keys, own.factors[:, 0]) if own is not None and self._slots.keys_rotated else keys

    def _places(self, ranks: Tensor, steps: Tensor) -> Tensor:
        """Positions of queries. Shape of both."""
        return {"cache": ranks, "stream": steps, "clamped": torch.full_like(ranks, self.limit)}[self.mode]

    def _factors(self, at: Tensor) -> QueryFactors:
        """RoPE at these places. [...] int64 -> [..., P]."""
        assert self.rotation is not None
        return QueryFactors(self.rotation.factors(at, self._slots.tensors.keys.dtype, self.length))
