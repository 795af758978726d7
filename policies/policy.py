"""The policy interface: a policy ranks cached tokens by importance, and the engine evicts the least important.

Axis letters: B streams, L layers, H KV heads, S slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from kvbench.policies.statistic import Statistic
from kvbench.policies.view import CacheView

Scope = Literal["slot", "head", "layer"]
PositionMode = Literal["cache", "stream", "clamped"]


@dataclass(frozen=True)
class Policy(ABC):
    """Decides which cached token gives up its slot to the next one.

    A policy is a frozen dataclass whose fields are its parameters. It is a pure function of its view: it never sees the
    model, never moves K or V, keeps no state and never syncs with the host. It must define `importance`;
    every other method has a neutral default.

    A parameter added later, `field(default=..., metadata={"added": True})`, is not in records while it has its default, so that
    old records still match.
    """

    evicts: ClassVar[bool] = True  # False: keeps every token and takes no capacity
    caches: ClassVar[bool] = True  # False: another decoder recomputes windows, or empties the cache
    outcome: ClassVar[bool] = False  # True: takes no capacity, because its budgets follow from the prompt (`prompt_budgets`)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics that the engine updates for the policy."""
        return ()

    @property
    def scope(self) -> Scope:
        """Slots on which the importance of a slot depends: itself alone, those of its head, or those of its layer."""
        return "slot"

    def bind(self, capacity: int) -> Self:
        """Resolve and check the parameters for a capacity of `capacity` tokens per KV head.

        With a table of `budgets`, each group of heads has a policy bound to its own budget. With `prompt_budgets` or
        `pool_floor`, all heads have the policy bound to the mean.

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

        The token with the lowest (importance, rank) is evicted. +inf is evicted only if every token of the head has it, so `bind`
        should refuse capacities that can't hold such tokens. Empty slots may hold anything but NaN.
        """

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> Sequence[Sequence[int]] | None:
        """Return fixed budgets that differ between KV heads, L lists of H integers; None if every head keeps `capacity`.

        Each is at least 1; they add up to `layers * heads * capacity`. Called on the policy bound to `capacity`.

        Args:
            capacity: tokens per KV head, on average.
            layers: L.
            heads: H.
            prompt: tokens of the prompt, if eviction waits for its end; None otherwise.

        Raises:
            ValueError: there is no such table for this model or prompt.
        """
        return None

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor | None:
        """Return budgets that depend on the whole prompt, [B, L, H] int64, or None.

        Called once, after the last token of a prompt that was read under full attention. For each stream they add up to
        `L * H * min(capacity, prompt length)`, unless the budgets are an `outcome`.

        Args:
            views: of every layer, with the whole prompt in it. L of them.
            capacity: tokens per KV head, on average; None if the budgets are an `outcome`.
        """
        return None

    def pool_floor(self, capacity: int) -> int | None:
        """Return the minimum of tokens per KV head if each eviction takes its victims from all heads of a layer, else None.

        A layer of H heads then keeps `H * capacity` tokens; the lowest (importance, rank, head) goes first. The minimum is
        between 1 and the capacity. Called on the policy bound to `capacity`.
        """
        return None


@dataclass(frozen=True)
class Composed(Policy):
    """A policy that holds another one in `score`, to which all methods but `band` delegate. Class attributes are its own."""

    score: Policy

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of `score`."""
        return self.score.statistics

    @property
    def scope(self) -> Scope:
        """Scope of `score`."""
        return self.score.scope

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside."""
        return replace(self, score=self.score.bind(capacity))

    def importance(self, view: CacheView) -> Tensor:
        """Importance given by `score`. [B, H, S] float32."""
        return self.score.importance(view)

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> Sequence[Sequence[int]] | None:
        """Budgets given by `score`."""
        return self.score.budgets(capacity, layers, heads, prompt)

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor | None:
        """Budgets given by `score`. [B, L, H] int64."""
        return self.score.prompt_budgets(views, capacity)

    def pool_floor(self, capacity: int) -> int | None:
        """Pool floor of `score`."""
        return self.score.pool_floor(capacity)
