"""Leverage: keep keys that few others resemble, by their statistical leverage.

Source: Chari & Van Durme 2025, arXiv:2507.08143 (Compactor), the part that reads keys. Read in NVIDIA/kvpress 8bb29b9,
`presses/leverage_press.py`: the rule here.
Differs: the sketch comes from the hash of (seed, layer, head), not from torch's generator, and is the same for every stream.
kvpress also subtracts the mean score and divides by the deviation, which changes no order; its regularisation grows tenfold
where a float32 Cholesky factorisation fails, while float64 needs no second try.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi
from typing import Self

import torch
from torch import Tensor

from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class Leverage(Policy):
    """Keep the tokens whose centred, unrotated keys have the highest leverage among those that the head holds."""

    scope = "head"

    sketch: int = 48  # dims to which keys are projected
    regularisation: float = 1e-2  # added to the diagonal of the Gram matrix

    def bind(self, capacity: int) -> Self:
        """Check the parameters."""
        if self.sketch < 1 or self.regularisation <= 0:
            raise ValueError(f"sketch {self.sketch} must be 1 or more, and regularisation {self.regularisation} above 0")
        return super().bind(capacity)

    def importance(self, view: CacheView) -> Tensor:
        """diag(X (XᵀX + r)⁻¹ Xᵀ) of the sketched keys X. [B, H, S] float32."""
        held = view.valid[..., None]
        keys = view.keys.double().masked_fill(~held, 0)
        centred = (keys - keys.sum(2, keepdim=True) / view.count[..., None]).masked_fill(~held, 0)
        x = centred @ gaussian_sketch(view, keys.shape[-1], self.sketch)
        one = torch.eye(self.sketch, dtype=x.dtype, device=x.device)
        factor, _ = torch.linalg.cholesky_ex(x.mT @ x + self.regularisation * one)
        return (x @ torch.linalg.solve_triangular(factor, one, upper=False).mT).square().sum(-1).float()


def gaussian_sketch(view: CacheView, rows: int, columns: int) -> Tensor:
    """Normal numbers of variance 1 / columns, by the Box-Muller transform. [B, H, rows, columns] float64.

    They depend on seed, layer and head alone.
    """
    index = torch.arange(2 * rows * columns, device=view.rank.device)
    numbers = replace(view, position=index.expand(*view.rank.shape[:2], -1)).uniform().double()
    radius, angle = numbers.unflatten(-1, (2, rows, columns)).unbind(2)
    return (-2 * (1 - radius).log() / columns).sqrt() * (2 * pi * angle).cos()
