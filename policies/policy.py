"""The interface: a policy says how much each cached token is worth.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

Scope = Literal["slot", "head", "layer"]
PositionMode = Literal["cache", "stream", "clamped"]

# Odd 64-bit multipliers for `CacheView.uniform`; any odd constants with well mixed bits would do.
_MIX = (-7046029254386353131, -4658895280553007687, 6364136223846793005, 2862933555777941757)


def mixed_seed(seed: int) -> int:
    """What a seed adds in `CacheView.uniform`; wraps around at 64 bits, as the tensors do."""
    return (seed * _MIX[3] + 2**63) % 2**64 - 2**63


@dataclass
class CacheView:
    """What a policy may see of one layer's cache after a step. Read only.

    Attributes:
        rank: place among the tokens its KV head holds, 0 = oldest; the number of slots if empty. [B, H, S] int64.
        position: the token's index in its stream; -1 in a slot never used. [B, H, S] int64.
        step: index of the token just processed, per stream. [B, 1, 1] int64.
        keys: unrotated keys, their dims in the engine's order. [B, H, S, D], the model's dtype.
        values: [B, H, S, D], the model's dtype.
        states: one tensor per statistic the policy names. [B, H, S, *k].
        layer: index of the layer; a view may show several layers at once, as if they were streams. [B, 1, 1] int64.
        num_layers: number of layers of the model.
        seed: the cell's seed.
    """

    rank: Tensor
    position: Tensor
    step: Tensor
    keys: Tensor
    values: Tensor
    states: dict[type[Statistic], Tensor]
    layer: Tensor
    num_layers: int = 1
    seed: int = 0

    @property
    def age(self) -> Tensor:
        """Steps since the token was processed; 0 = the newest. Meaningless where not `valid`. [B, H, S] int64."""
        return self.step - self.position

    @property
    def valid(self) -> Tensor:
        """Whether the slot holds a token. [B, H, S] bool."""
        return self.rank < self.rank.shape[-1]

    def state(self, statistic: type[Statistic]) -> Tensor:
        """The running statistic of every slot. [B, H, S, *k] float32.

        Raises:
            ValueError: the policy did not name this statistic in `statistics`.
        """
        if statistic not in self.states:
            raise ValueError(f"statistic {statistic.__name__} is not in the policy's `statistics`")
        return self.states[statistic]

    def uniform(self) -> Tensor:
        """A number in [0, 1), fixed by (seed, layer, head, position) alone. [B, H, S] float32.

        A hash, not a generator: the same for every batch, block and slot order.
        """
        head = torch.arange(self.position.shape[1], device=self.position.device).view(1, -1, 1)
        x = self.position * _MIX[0] + head * _MIX[1] + self.layer * _MIX[2] + mixed_seed(self.seed)
        for multiplier in _MIX[:2]:
            x = (x ^ (x >> 29)) * multiplier
        return ((x >> 40) & 0xFFFFFF).float() / 2**24


class Statistic(ABC):
    """A number (or `shape` of them) kept for every slot, reset to `initial` when the slot is given away."""

    shape: ClassVar[tuple[int, ...]] = ()  # extra axes *k
    initial: ClassVar[float] = 0.0

    @staticmethod
    @abstractmethod
    def update(state: Tensor, attention: Tensor, view: CacheView) -> Tensor:
        """The state after one step; a new tensor, the arguments unchanged.

        Args:
            state: before the step. [B, H, S, *k] float32.
            attention: softmax weights of this step's queries, 0 in empty slots. [B, H, G, S] float32.
            view: the cache with the new token in it.
        """


@dataclass(frozen=True)
class Policy(ABC):
    """Decides which cached token gives its slot to the next one.

    A policy is a frozen dataclass whose fields are its parameters. It is pure: it never sees the model,
    never moves K or V, keeps no state of its own and never syncs with the host.
    """

    statistics: ClassVar[tuple[type[Statistic], ...]] = ()  # what the engine must keep for it, per slot
    scope: ClassVar[Scope] = "slot"  # what `importance` compares: nothing, slots of a head, heads of a layer
    evicts: ClassVar[bool] = True  # False: keeps everything and takes no capacity
    caches: ClassVar[bool] = True  # False: keeps no K/V at all and recomputes

    def bind(self, capacity: int) -> Self:
        """This policy with its parameters resolved and checked for `capacity` tokens per KV head.

        Raises:
            ValueError: the capacity can't serve this policy.
        """
        if capacity < 1:
            raise ValueError(f"capacity {capacity} is below 1")
        return self

    def band(self, capacity: int) -> tuple[int, int] | None:
        """(sinks, window): once bound, what is kept after every step is the `sinks` first tokens and the `window` newest.

        None, the default, where the choice looks at anything else. Their sum is the capacity. Naming it lets a block be
        computed in closed form instead of token by token; `bench policy check` holds it to `importance`.
        """
        return None

    @abstractmethod
    def importance(self, view: CacheView) -> Tensor:
        """Worth of every cached token, the newest (age 0) included. [B, H, S] float32.

        The lowest (importance, rank) is evicted; +inf never is. Empty slots may hold anything but NaN.
        """
