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
    model, never moves K or V, keeps no state and never syncs with the host. It must say how important each token is; the
    other questions have answers that change nothing and cost nothing.

    A parameter added later, `field(default=..., metadata={"added": True})`, is not in records while it has its default, so that
    old records still match.
    """

    evicts: ClassVar[bool] = True  # False: keeps every token and takes no capacity
    caches: ClassVar[bool] = True  # False: keeps no K/V and recomputes the window for every token
    outcome: ClassVar[bool] = False  # True: takes no capacity, because its budgets follow from the prompt (`prompt_budgets`)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Running statistics that the engine keeps for it."""
        return ()

    @property
    def scope(self) -> Scope:
        """What the importance of a slot depends on: that slot alone, its whole head, or its whole layer."""
        return "slot"

    def bind(self, capacity: int) -> Self:
        """Resolve and check the parameters for a capacity of `capacity` tokens per KV head.

        Where budgets differ, every group of heads has a policy bound to its own budget.

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

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> Sequence[Sequence[int]] | None:
        """How many tokens each KV head keeps, if that is known beforehand and not the same everywhere: L lists of H integers.

        They add up to `layers * heads * capacity`. Asked of the policy bound to the capacity.

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
        """How many tokens each KV head keeps, if the whole prompt decides. [B, L, H] int64; None if it does not.

        Asked once, after the last token of a prompt that was read under full attention. For each stream they add up to
        `L * H * capacity`, unless the budgets are an `outcome`.

        Args:
            views: of every layer, with the whole prompt in it. L of them.
            capacity: tokens per KV head, on average; None if the budgets are an `outcome`.
        """
        return None

    def pool_floor(self, capacity: int) -> int | None:
        """Tokens that every KV head keeps at least, if each eviction draws its victims from all heads of a layer.

        A layer of H heads then keeps `H * capacity` tokens, in whichever heads they are worth most. None: each head evicts its
        own. Asked of the policy bound to the capacity.
        """
        return None


@dataclass(frozen=True)
class Composed(Policy):
    """A policy that holds another one in a field `score` and delegates to it whatever it does not answer itself."""

    score: Policy

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Those of the policy inside."""
        return self.score.statistics

    @property
    def scope(self) -> Scope:
        """That of the policy inside."""
        return self.score.scope

    def bind(self, capacity: int) -> Self:
        """Bind the policy inside."""
        return replace(self, score=self.score.bind(capacity))

    def importance(self, view: CacheView) -> Tensor:
        """That of the policy inside. [B, H, S] float32."""
        return self.score.importance(view)

    def budgets(self, capacity: int, layers: int, heads: int, prompt: int | None) -> Sequence[Sequence[int]] | None:
        """Those of the policy inside."""
        return self.score.budgets(capacity, layers, heads, prompt)

    def prompt_budgets(self, views: Sequence[CacheView], capacity: int | None) -> Tensor | None:
        """Those of the policy inside. [B, L, H] int64."""
        return self.score.prompt_budgets(views, capacity)

    def pool_floor(self, capacity: int) -> int | None:
        """That of the policy inside."""
        return self.score.pool_floor(capacity)
