"""Translate a policy of scope `slot` to expressions in C or Triton that compute the policy for one slot.

`importance` and the statistics' `update` run once on stand-ins for tensors that record the operations. Elementwise operations
are supported, and reductions over the last axis of a statistic with a few numbers per slot. Any other operation raises an error,
and the policy uses the plain walk.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, k numbers of a statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvbench.harness.kernels.expressions import (
    BINARY,
    TRITON,
    C,
    Dialect,
    Expression,
    NotTraceableError,
    state,
    uniform,
    variable,
)
from kvbench.harness.kernels.recording import Traced
from kvbench.policies import CacheView, HeadSizes, Policy, Statistic
from kvbench.policies.merges import Merging

__all__ = ["TRITON", "C", "Dialect", "Formulas", "NotTraceableError", "traced"]

MAX_NUMBERS = 8  # per slot, of all statistics of a policy


class Formulas(NamedTuple):
    """Expressions of a bound policy for one slot, in one language.

    Attributes:
        importance: importance of the slot.
        updates: new value of every number of the statistics.
        widths: for each number, the count of numbers in its statistic.
        reads: variables in all expressions.
    """

    importance: str
    updates: tuple[str, ...]
    widths: tuple[int, ...]
    reads: frozenset[str]


class _Weights:
    """Stand-in for softmax weights [B, H, G, S]. It supports only reductions over the query heads."""

    def sum(self, dim: int) -> Traced:
        """Return the sum over the query heads of the KV head."""
        return Traced([self._reduced("mass", dim)])

    def mean(self, dim: int) -> Traced:
        """Return the mean over the query heads of the KV head."""
        return Traced([BINARY["truediv"](self._reduced("mass", dim), variable("group"))])

    def amax(self, dim: int) -> Traced:
        """Return the maximum over the query heads of the KV head."""
        return Traced([self._reduced("most", dim)])

    @staticmethod
    def _reduced(name: str, dim: int) -> Expression:
        if dim not in (2, -2):
            raise NotTraceableError("a reduction of attention over another axis than the query heads")
        return variable(name)

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"'{name}' of attention")


class _Attention:
    """Stand-in for a token's attention. It supports only softmax weights."""

    weights = _Weights()

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"{name} of attention")


class _View(CacheView):
    """Stand-in for the view of a cache."""

    def __init__(self, states: dict[Statistic, Any]) -> None:
        def read(name: str) -> Any:
            return Traced([variable(name)])

        self.states, self.rank, self.position, self.step = states, read("rank"), read("position"), read("step")
        self.layer, self.head, self.prompt, self.num_layers = read("layer"), read("head"), read("prompt"), read("num_layers")

    @property
    def valid(self) -> Any:
        return self.rank >= 0  # results for empty slots are not used

    @property
    def count(self) -> Any:
        return Traced([variable("count")])

    def uniform(self) -> Any:
        return Traced([uniform()])

    def __getattribute__(self, name: str) -> Any:
        if name in _REFUSED:
            raise NotTraceableError(_REFUSED[name])
        return super().__getattribute__(name)


_REFUSED = {
    "keys": "keys or values",
    "values": "keys or values",
    "rotated_keys": "rotated keys",
    "rotate": "rotated keys",
    "by_rank": "'by_rank', which compares slots",
    "by_slot": "'by_slot', which compares slots",
    "seed": "'seed' of a view",
}


def _width(statistic: Statistic) -> int | None:
    """Return the count of numbers per slot of a statistic; None if it has no last axis.

    Raises:
        NotTraceableError: the statistic is not a few numbers per slot, or sees more than softmax weights.
    """
    name = type(statistic).__name__
    if statistic.per != "slot":
        raise NotTraceableError(f"{name}, a statistic per head,")
    if not set(statistic.sees) <= {"weights"}:
        raise NotTraceableError(f"{name}, which sees {', '.join(statistic.sees)},")
    shape = statistic.shape(HeadSizes(1, 1, 1))
    if len(shape) > 1 or shape != statistic.shape(HeadSizes(2, 3, 5)):
        raise NotTraceableError(f"{name}, whose shape is not a few numbers per slot,")
    return shape[0] if shape else None


def _states(statistics: Sequence[Statistic]) -> tuple[dict[Statistic, Traced], tuple[int, ...]]:
    """Return a stand-in for each statistic's state, and, for each number, the count of numbers in its statistic."""
    states: dict[Statistic, Traced] = {}
    widths: list[int] = []
    for statistic in dict.fromkeys(statistics):
        width = _width(statistic)
        numbers = range(len(widths), len(widths) + (1 if width is None else width))
        states[statistic] = Traced([state(i) for i in numbers], width is not None)
        widths += [len(numbers)] * len(numbers)
    if len(widths) > MAX_NUMBERS:
        raise NotTraceableError(f"statistics of {len(widths)} numbers per slot, more than {MAX_NUMBERS},")
    return states, tuple(widths)


def _updated(statistic: Statistic, before: Traced, view: _View) -> list[Expression]:
    """Return the expressions of a statistic's numbers after a step."""
    if not statistic.sees:
        return list(before.elements)
    after = Traced.of(statistic.update(before, _Attention(), view))  # type: ignore[arg-type]
    if after.has_axis != before.has_axis or len(after.elements) not in (1, len(before.elements)):
        raise NotTraceableError("an update that changes a state's shape")
    return list(after.elements) * (len(before.elements) // len(after.elements))


def traced(policy: Policy, dialect: Dialect = C) -> Formulas:
    """Trace the computation of a bound policy for one slot. Variables are those of `expressions.VARIABLES`, and the seed.

    Raises:
        NotTraceableError: the policy can't be traced; the message says why.
    """
    if policy.scope != "slot":
        raise NotTraceableError(f"scope '{policy.scope}'")
    if isinstance(policy, Merging):
        raise NotTraceableError("a merge")
    try:
        states, widths = _states(policy.statistics)
        view = _View(states)
        importance = Traced.of(policy.importance(view)).single
        updates = [number for s, before in states.items() for number in _updated(s, before, view)]
    except NotTraceableError:
        raise
    except Exception as error:  # a user's policy may raise anything
        raise NotTraceableError(f"{type(error).__name__}: {error}") from error
    results = [x.to("float") for x in (importance, *updates)]
    sources = [x.source(dialect) for x in results]
    return Formulas(sources[0], tuple(sources[1:]), widths, frozenset().union(*(x.reads for x in results)))
