"""KeyDiff: keep the keys that differ most from the others.

Source: Park et al. 2025, arXiv:2504.15364. Read in NVIDIA/kvpress 8bb29b9, `presses/keydiff_press.py`: the defaults here.
Differs: the paper evicts after every block of a prompt and at every step, kvpress once after the prompt: see the axis `evict`.
The paper's variant with a sliding window is `window`. `keys: unrotated` is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal, Self

from torch import Tensor
from torch.nn import functional

from kvbench.policies.policy import Policy
from kvbench.policies.statistic import HeadSizes, Seen, Statistic, Written
from kvbench.policies.view import CacheView


@dataclass(frozen=True)
class UnitKeySum(Statistic):
    """The sum of the keys that a head holds, each scaled to length 1. [B, H, D] float64."""

    sees: ClassVar[tuple[Seen, ...]] = ()
    per: ClassVar[Literal["slot", "head"]] = "head"

    keys: Literal["rotated", "unrotated"]

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """One number per dim of a key."""
        return (sizes.key_dim,)

    def written(self, token: Written) -> Tensor:
        """The token's unit key. [*n, D] float32."""
        keys = token.rotated_keys if self.keys == "rotated" else token.keys
        return functional.normalize(keys.float(), dim=-1)


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keep the tokens whose keys are least similar, by cosine, to the mean of the head's unit keys."""

    scope = "head"

    keys: Literal["rotated", "unrotated"] = "rotated"  # to their positions in the stream, or before RoPE
    window: int = 0  # newest tokens that are never evicted

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The sum of unit keys, from which the mean follows."""
        return (UnitKeySum(self.keys),)

    def bind(self, capacity: int) -> Self:
        """The window leaves room for at least one other token."""
        if not 0 <= self.window < capacity:
            raise ValueError(f"capacity {capacity} can't hold window {self.window} + at least 1 other token")
        return self

    def importance(self, view: CacheView) -> Tensor:
        """Cosine of the key and the mean unit key, negated. [B, H, S] float32."""
        anchor = (view.state(UnitKeySum(self.keys)) / view.count).float()
        keys = view.rotated_keys if self.keys == "rotated" else view.keys
        cosine = (functional.normalize(keys.float(), dim=-1) * functional.normalize(anchor, dim=-1)[:, :, None]).sum(-1)
        return (-cosine).masked_fill(~view.valid, -inf).masked_fill(view.age < self.window, inf)
