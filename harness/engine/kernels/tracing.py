"""Turns a policy of scope `slot` into expressions in C or Triton that compute it for one slot.

`importance` and the statistic's `update` run once on stand-ins for tensors that record the operations. A few elementwise
operations are supported. Any other raises, and the policy uses the plain walk.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from kvbench.policies import CacheView, HeadSizes, Policy, Statistic


class NotTraceableError(TypeError):
    """A policy uses an operation that the compiled walk does not support."""


@dataclass(frozen=True)
class Dialect:
    """The syntax of one language, as format strings of operands."""

    where: str
    negated: str  # logical not
    single: str  # cast to float32
    integer: str  # cast to int64
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
    """Stands in for a tensor with one number per slot, and records the operations that led to it."""

    def __init__(self, form: str, *operands: Any) -> None:
        """Record an operation. `form` is a format string of the operands or the name of a field of `Dialect`."""
        for x in operands:
            if not isinstance(x, (Traced, int, float)):
                raise NotTraceableError(f"an operand of type {type(x).__name__}")
        self._form, self._operands = form, operands

    def source(self, dialect: Dialect) -> str:
        """The expression in one language."""
        texts = [x.source(dialect) if isinstance(x, Traced) else _literal(x, dialect) for x in self._operands]
        return getattr(dialect, self._form, self._form).format(*texts)

    def masked_fill(self, mask: Traced, value: Any) -> Traced:
        """`Tensor.masked_fill`."""
        return Traced("where", mask, value, self)

    def float(self) -> Traced:
        """`Tensor.float`."""
        return Traced("single", self)

    def long(self) -> Traced:
        """`Tensor.long`."""
        return Traced("integer", self)

    def abs(self) -> Traced:
        """`Tensor.abs`."""
        return Traced("where", Traced("({0} < {1})", self, 0), -self, self)

    def clamp(self, min: Any = None, max: Any = None) -> Traced:  # noqa: A002
        """`Tensor.clamp`."""
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
        """Supports torch.where and torch.full_like only."""
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


class _Weights:
    """Stands in for softmax weights [B, H, G, S]. It supports only the sum over query heads."""

    def sum(self, dim: int) -> Traced:
        """The sum over the query heads of the KV head."""
        if dim not in (2, -2):
            raise NotTraceableError("a sum of attention over another axis than the query heads")
        return Traced("mass")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"'{name}' of attention")


class _Attention:
    """Stands in for what a token's attention did. It supports only softmax weights."""

    weights = _Weights()

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"{name} of attention")


class _View(CacheView):
    """Stands in for the view of a cache."""

    def __init__(self, states: dict[Statistic, Any]) -> None:
        tensors: Any = [Traced(name) for name in ("rank", "position", "step", "layer", "head")]
        rank, position, step, layer, head = tensors
        refused: Any = _Refused()
        super().__init__(rank, position, step, refused, refused, states, layer, head, refused)

    @property
    def valid(self) -> Any:
        return Traced("1")

    def uniform(self) -> Any:
        return Traced("uniform(position, head, layer, seed)")


class _Refused:
    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError("keys or values")


def _is_plain(statistic: Statistic) -> bool:
    """Whether a statistic is one number per slot that starts from a constant and sees only softmax weights."""
    overridden = type(statistic).written is not Statistic.written or statistic.per != "slot"
    return not statistic.shape(HeadSizes(1, 1, 1)) and not overridden and statistic.sees == ("weights",)


def traced(policy: Policy, dialect: Dialect = C) -> tuple[str, str]:
    """Source of a bound policy's importance and of its statistic's new state ("state" if it has none), for one slot.

    Variables in it: state, mass (attention received, summed over query heads), rank, position, step, layer, head, seed.
    uniform(position, head, layer, seed) is `CacheView.uniform`.

    Raises:
        NotTraceableError: the policy can't be compiled; the message says why.
    """
    if policy.scope != "slot":
        raise NotTraceableError(f"scope '{policy.scope}'")
    if len(policy.statistics) > 1 or not all(_is_plain(s) for s in policy.statistics):
        raise NotTraceableError("more than one statistic, or one with several numbers per slot")
    states: dict[Statistic, Any] = {s: Traced("state") for s in policy.statistics}
    view, attention = _View(states), _Attention()
    try:
        importance = policy.importance(view)
        update = next((s.update(states[s], attention, view) for s in policy.statistics), Traced("state"))  # type: ignore[arg-type]
    except NotTraceableError:
        raise
    except Exception as error:  # a user's policy may raise anything
        raise NotTraceableError(f"{type(error).__name__}: {error}") from error
    if not isinstance(importance, Traced) or not isinstance(update, Traced):
        raise NotTraceableError("an importance that is not one number per slot")
    return importance.source(dialect), update.source(dialect)
