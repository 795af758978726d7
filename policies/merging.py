"""Merging of values: an evicted token's value is averaged into that of the kept token with the most similar key.

Source: NVIDIA/kvpress 8bb29b9, presses/merging_press.py (`MergingPress`).
Differs: `score` may be any policy, and values are also merged while decoding. All evicted tokens are merged: kvpress'
`merge_fraction` is always 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from kvbench.policies.h2o import H2O
from kvbench.policies.merges import Evicted, Merged, Merging, Nearest
from kvbench.policies.policy import Policy
from kvbench.policies.view import CacheView

_EPSILON = 1e-6  # keeps a division finite


@dataclass(frozen=True)
class ValueMerging(Merging):
    """Evict what `score` evicts, and merge its value into the kept token with the most similar key. Keys stay as they are."""

    score: Policy = field(default_factory=H2O)
    threshold: float = 0.0  # cosine below which a value is dropped

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside and check `threshold`."""
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} is not between 0 and 1")
        return super().bind(capacity)

    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        """Average values, weighted by similarity and by the share of the evicted value's norm."""
        nearest = Nearest.of(view, evicted)
        values, given = view.values.to(nearest.rotated.dtype), evicted.take(view.values).to(nearest.rotated.dtype)
        target = nearest.take(values).norm(dim=-1)
        weights = nearest.similarity.clamp(min=0) * (nearest.similarity >= self.threshold) * evicted.real
        norm = given.norm(dim=-1)
        weights = weights * norm / (norm + target + _EPSILON)
        total = nearest.total(weights)
        merged = (nearest.take(values) + nearest.total(weights[..., None] * given)) / (1 + total[..., None])
        return Merged(nearest.put(view.values, merged.to(view.values.dtype), total > 0))
