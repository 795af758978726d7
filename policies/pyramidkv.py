"""PyramidKV: lower layers keep more tokens than higher ones, in equal steps from layer to layer.

Source: Cai et al. 2024, arXiv:2406.02069, Section 4.2. The rule was read in Zefan-Cai/KVCache-Factory c97f9d7,
pyramidkv/pyramidkv_utils.py (`PyramidKVCluster`), and NVIDIA/kvpress 8bb29b9, kvpress/presses/pyramidkv_press.py.
Differs: `paper`: shares are real numbers, rounded so that the total is that of the capacity. `official`: the step from layer to
    layer is rounded down. In KVCache-Factory, the first layer keeps its share all the same, so the mean exceeds the capacity by
    up to (L - 1) / 2 tokens; here this excess is subtracted equally from all layers. `kvpress`: shares include the window; if the
    last layer's share is less than the window, all layers keep the same number, without a warning. kvpress rounds each layer by
    itself; the totals agree unless a share ends in one half. In all three, a layer keeps at least one token beside the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch

from kvbench.policies.policy import Composed, Policy
from kvbench.policies.shares import integer_shares, window_of
from kvbench.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(Composed):
    """Keep the tokens with the highest importance by `score`; budgets decrease linearly from the first layer to the last."""

    score: Policy = field(default=SnapKV())
    beta: float = 20  # the highest layer's share is 1 / beta of the mean, apart from the window
    window: int | None = None  # tokens that every layer keeps apart from its share; the window of `score` when None
    variant: Literal["paper", "official", "kvpress"] = "paper"

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside and resolve the window."""
        score = self.score.bind(capacity)
        window = window_of(score) if self.window is None else self.window
        if self.beta < 1:
            raise ValueError(f"beta {self.beta} is below 1")
        if not 0 <= window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {window} + at least 1 token of the pyramid")
        return replace(self, score=score, window=window)

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> list[list[int]]:
        """Return budgets that are equal for all heads of a layer. L lists of H integers."""
        assert self.window is not None, "bind first"
        apart = 0 if self.variant == "kvpress" else self.window
        top, bottom = self._ends(capacity - apart, prompt)
        if self.variant == "kvpress" and (bottom < self.window or top < bottom):
            top = bottom = capacity
        step = (top - bottom) / max(1, layers - 1)
        if self.variant == "official":
            step = step // 1
        middle = (layers - 1) / 2
        shares = [capacity + step * (middle - layer) for layer in range(layers)]
        by_layer = integer_shares(
            torch.tensor(shares, dtype=torch.float64, device="cpu"), layers * capacity, self.window + 1
        ).tolist()
        return [[budget] * heads for budget in by_layer]

    def _ends(self, mean: int, prompt: int | None) -> tuple[float, float]:
        """Shares of the first and the last layer, given the mean share."""
        assert self.window is not None
        bottom = mean // self.beta if self.variant == "official" else mean / self.beta
        top = 2 * mean - bottom
        if prompt is None:
            return top, bottom
        if self.variant != "kvpress" and prompt < 2 * mean:
            return mean, mean
        most = prompt - self.window
        return (most, 2 * mean - most) if top >= most else (top, bottom)
