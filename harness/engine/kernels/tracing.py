"""What a policy of scope `slot` computes for one slot, as an expression that a kernel can take in, in C or Triton.

`importance` and the statistics' `update` are run once on stand-ins for tensors that write down what is done to them. What they
do must be elementwise and of a few kinds; anything else raises, and the policy is walked plainly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from kvbench.policies import CacheView, Policy, Statistic


class NotTraceableError(TypeError):
    """A policy does something that has no place in the compiled walk."""


@dataclass(frozen=True)
class Dialect:
    """How expressions are written down in one language, as format strings of operands."""

    where: str
    negated: str  # of a truth value
    single: str  # as float32
    integer: str  # as int64
    number: Callable[[int], str]
    fraction: Callable[[float], str]


C = Dialect(
    "({0} ? {1} : {2})", "(!{0})", "((float){0})", "((int64_t){0})", lambda x: f"{x}LL",
    lambda x: {"inf": "INFINITY", "-inf": "(-INFINITY)", "nan": "NAN"}.get(repr(x), f"((float){x!r})"),
)  # fmt: skip
TRITON = Dialect(
    "tl.where({0}, {1}, {2})", "({0} == 0)", "tl.cast({0}, tl.float32)", "tl.cast({0}, tl.int64)", str,
    lambda x: repr(x) if isfinite(x) else f'float("{x}")',
)  # fmt: skip

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and_": "&", "or_": "|", "xor": "^",
}  # fmt: skip


class Traced:
    """Stands in for a tensor of one number a slot, and remembers what was done to get it."""

    def __init__(self, form: str, *operands: Any) -> None:
        """With a format string of the operands, or the name of a field of `Dialect` that holds one."""
        for x in operands:
            if not isinstance(x, (Traced, int, float)):
                raise NotTraceableError(f"an operand of type {type(x).__name__}")
        self._form, self._operands = form, operands

    def source(self, dialect: Dialect) -> str:
        """The expression in one language."""
        texts = [x.source(dialect) if isinstance(x, Traced) else _literal(x, dialect) for x in self._operands]
        return getattr(dialect, self._form, self._form).format(*texts)

    def masked_fill(self, mask: Traced, value: Any) -> Traced:
        """As the tensor's."""
        return Traced("where", mask, value, self)

    def float(self) -> Traced:
        """As the tensor's."""
        return Traced("single", self)

    def long(self) -> Traced:
        """As the tensor's."""
        return Traced("integer", self)

    def abs(self) -> Traced:
        """As the tensor's."""
        return Traced("where", Traced("({0} < {1})", self, 0), -self, self)

    def clamp(self, min: Any = None, max: Any = None) -> Traced:  # noqa: A002
        """As the tensor's."""
        low = self if min is None else Traced("where", Traced("({0} < {1})", self, min), min, self)
        return low if max is None else Traced("where", Traced("({0} > {1})", low, max), max, low)

    def __neg__(self) -> Traced:
        return Traced("(-{0})", self)

    def __invert__(self) -> Traced:
        return Traced("negated", self)

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"'{name}' of a tensor")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch.where and torch.full_like; nothing else."""
        if function is torch.where and len(args) == 3:
            return Traced("where", *args)
        if function is torch.full_like:
            return Traced("single", args[1])
        raise NotTraceableError(getattr(function, "__name__", str(function)))


def _literal(value: Any, dialect: Dialect) -> str:
    return dialect.fraction(value) if isinstance(value, float) else dialect.number(int(value))


def _infix(name: str) -> Callable[[Traced, Any], Traced]:
    return lambda self, other: Traced(f"({{0}} {_INFIX[name]} {{1}})", self, other)


def _reflected(name: str) -> Callable[[Traced, Any], Traced]:
    return lambda self, other: Traced(f"({{0}} {_INFIX[name]} {{1}})", other, self)


for _name in _INFIX:
    assert hasattr(operator, _name)
    _plain = _name.rstrip("_")
    setattr(Traced, f"__{_plain}__", _infix(_name))
    if _plain not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Traced, f"__r{_plain}__", _reflected(_name))


class _Attention:
    """Stands in for softmax weights [B, H, G, S]: the sum over the query heads is all that can be asked for."""

    def sum(self, dim: int) -> Traced:
        """Over the query heads of the KV head."""
        if dim not in (2, -2):
            raise NotTraceableError("a sum of attention over another axis than the query heads")
        return Traced("mass")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"'{name}' of attention")


class _View(CacheView):
    """Stands in for the view of a cache."""

    def __init__(self, states: dict[type[Statistic], Any]) -> None:
        """With the states that the policy keeps."""
        given: Any = {name: Traced(name) for name in ("rank", "position", "step", "layer")}
        refused: Any = _Refused()
        super().__init__(given["rank"], given["position"], given["step"], refused, refused, states, given["layer"])

    @property
    def valid(self) -> Any:
        return Traced("1")

    def uniform(self) -> Any:
        return Traced("uniform(position, head, layer, seed)")


class _Refused:
    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError("keys or values")


def traced(policy: Policy, dialect: Dialect = C) -> tuple[str, str]:
    """Source of a bound policy's importance, and of its statistic's new state ("state" if it has none), for one slot.

    Names in it: state, mass (attention received, summed over query heads), rank, position, step, layer, head, seed.
    uniform(position, head, layer, seed) is `CacheView.uniform`.

    Raises:
        NotTraceableError: and why.
    """
    if policy.scope != "slot":
        raise NotTraceableError(f"scope '{policy.scope}'")
    if len(policy.statistics) > 1 or any(s.shape for s in policy.statistics):
        raise NotTraceableError("more than one statistic, or one of several numbers a slot")
    states: dict[type[Statistic], Any] = {s: Traced("state") for s in policy.statistics}
    view, attention = _View(states), _Attention()
    try:
        worth = policy.importance(view)
        update = next((s.update(states[s], attention, view) for s in policy.statistics), Traced("state"))  # type: ignore[arg-type]
    except NotTraceableError:
        raise
    except Exception as error:  # a user's policy may do anything with what it is given
        raise NotTraceableError(f"{type(error).__name__}: {error}") from error
    if not isinstance(worth, Traced) or not isinstance(update, Traced):
        raise NotTraceableError("its importance is no number a slot")
    return worth.source(dialect), update.source(dialect)
