"""The policy interface: a policy ranks cached tokens by importance, and the engine evicts the least important.

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

# Any odd 64-bit constants with well-mixed bits would do.
_HASH_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, 6364136223846793005, 2862933555777941757)


def mixed_seed(seed: int) -> int:
    """The seed's term in the hash of `CacheView.uniform`. It wraps at 64 bits, like int64 tensors."""
    return (seed * _HASH_MULTIPLIERS[3] + 2**63) % 2**64 - 2**63


@dataclass
class CacheView:
    """One layer's cache after a step, as a policy sees it. Read only.

    Attributes:
        rank: the token's place among those its KV head holds, 0 = oldest; S if the slot is empty. [B, H, S] int64.
        position: the token's index in its stream; -1 if the slot was never used. [B, H, S] int64.
        step: index of the token just processed, per stream. [B, 1, 1] int64.
        keys: unrotated keys, dims in the engine's order. [B, H, S, D], the model's dtype.
        values: [B, H, S, D], the model's dtype.
        states: one tensor per statistic that the policy declares. [B, H, S, *k].
        layer: index of the layer. A view may show several layers at once, stacked along B. [B, 1, 1] int64.
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
        """Steps since the token was processed, 0 = newest. Meaningless where not `valid`. [B, H, S] int64."""
        return self.step - self.position

    @property
    def valid(self) -> Tensor:
        """Whether the slot holds a token. [B, H, S] bool."""
        return self.rank < self.rank.shape[-1]

    def state(self, statistic: type[Statistic]) -> Tensor:
        """The value of a running statistic for every slot. [B, H, S, *k] float32.

        Raises:
            ValueError: the policy does not declare this statistic in `statistics`.
        """
        if statistic not in self.states:
            raise ValueError(f"statistic {statistic.__name__} is not in the policy's `statistics`")
        return self.states[statistic]

    def uniform(self) -> Tensor:
        """A random number in [0, 1) for every token. [B, H, S] float32.

        It is a hash of (seed, layer, head, position), so batch size, block size and slot order do not change it.
        """
        head = torch.arange(self.position.shape[1], device=self.position.device).view(1, -1, 1)
        by_position, by_head, by_layer, _ = _HASH_MULTIPLIERS
        x = self.position * by_position + head * by_head + self.layer * by_layer + mixed_seed(self.seed)
        for multiplier in (by_position, by_head):
            x = (x ^ (x >> 29)) * multiplier
        return ((x >> 40) & 0xFFFFFF).float() / 2**24


class Statistic(ABC):
    """A pure update rule for a number (or a tensor of shape `shape`) kept for every slot.

    The engine resets it to `initial` when the slot takes a new token.
    """

    shape: ClassVar[tuple[int, ...]] = ()  # the axes *k
    initial: ClassVar[float] = 0.0

    @staticmethod
    @abstractmethod
    def update(state: Tensor, attention: Tensor, view: CacheView) -> Tensor:
        """Return the state after one step, as a new tensor.

        Args:
            state: before the step. [B, H, S, *k] float32.
            attention: softmax weights of this step's queries; 0 in empty slots. [B, H, G, S] float32.
            view: the cache, with the new token in it.
        """


@dataclass(frozen=True)
class Policy(ABC):
    """Decides which cached token gives up its slot to the next one.

    A policy is a frozen dataclass whose fields are its parameters. It is a pure function of its view: it never sees the
    model, never moves K or V, keeps no state and never syncs with the host.
    """

    statistics: ClassVar[tuple[type[Statistic], ...]] = ()  # running statistics the engine keeps for every slot
    scope: ClassVar[Scope] = "slot"  # importance of a slot depends on that slot alone, its whole head, or its whole layer
    evicts: ClassVar[bool] = True  # False: keeps every token and takes no capacity
    caches: ClassVar[bool] = True  # False: keeps no K/V and recomputes the window for every token

    def bind(self, capacity: int) -> Self:
        """Resolve and check the parameters for a capacity of `capacity` tokens per KV head.

        Raises:
            ValueError: the policy can't work with this capacity.
        """
        if capacity < 1:
            raise ValueError(f"capacity {capacity} is below 1")
        return self

    def band(self, capacity: int) -> tuple[int, int] | None:
        """(sinks, window) if the bound policy always keeps the first `sinks` tokens and the `window` newest, else None.

        The two add up to the capacity. A policy that declares its band is computed a block at a time, in closed form,
        instead of token by token. `bench policy check` verifies that `importance` keeps the same tokens.
        """
        return None

    @abstractmethod
    def importance(self, view: CacheView) -> Tensor:
        """Importance of every cached token, the newest (age 0) included. [B, H, S] float32.

        The token with the lowest (importance, rank) is evicted; +inf is never evicted. Empty slots may hold anything but NaN.
        """
