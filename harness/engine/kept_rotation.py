"""Rotated keys of a layer's slots, kept while a block is walked, so that each key is rotated once and not at every token.

Axis letters: B streams, H KV heads, N = B * H, S slots, T tokens, D key dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvbench.policies import CacheView

if TYPE_CHECKING:
    from kvbench.harness.engine.slot_rows import Rows


class FloatView(CacheView):
    """View of slots that hold unrotated keys as numbers.

    Attributes:
        keeps: whether rotated keys are kept once a policy has read them.
        kept: the rotated keys that are kept. [B, H, S, D].
    """

    keeps = False
    kept: Tensor | None = None

    @property
    def rotated_keys(self) -> Tensor:
        """Keys rotated to their positions in the stream. [B, H, S, D]."""
        if self.kept is not None:
            return self.kept
        rotated = super().rotated_keys
        if self.keeps:
            self.kept = rotated
        return rotated


class KeptRotation:
    """Context in which the view of a layer's rows keeps rotated keys while the tokens of a block are written one by one."""

    def __init__(self, rows: Rows, keys: Tensor, steps: Sequence[Tensor]) -> None:
        """Prepare for a block.

        Args:
            keys: keys of the block's tokens, unrotated, paired. [N, T, D].
            steps: position of each token in its stream. [N] int64 each.
        """
        self._rows, self._keys, self._steps = rows, keys, steps
        self._view = rows.view if isinstance(rows.view, FloatView) else None
        self._rotated: Sequence[Tensor] = ()  # keys of the block, one token each. [N, D]
        self._offset = rows.rank.shape[1] * torch.arange(len(rows.rank), device=keys.device) - rows.row_base

    def __enter__(self) -> Self:
        if self._view is not None:
            self._view.keeps = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.keeps, self._view.kept = False, None

    def follow(self, t: int) -> None:
        """Change the kept key of the slot that token `t` of the block was written to."""
        if self._view is None or self._view.kept is None:
            return
        if not self._rotated:
            steps = torch.stack(list(self._steps), 1)
            self._rotated = self._view.rotate(self._keys, steps).movedim(1, 0).contiguous().unbind(0)
        self._view.kept.flatten(0, 2).index_copy_(0, self._rows.free + self._offset, self._rotated[t])
