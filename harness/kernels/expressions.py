"""Expressions that compute one number for one slot, and their source code in C and in Triton.

Dtypes are promoted as in PyTorch: masks to int64, masks and int64 to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Literal

Kind = Literal["bool", "int", "float"]
Build = Callable[..., "Expression"]

_KINDS: tuple[Kind, ...] = ("bool", "int", "float")  # in the order of promotion
_MAX_OPERATIONS = 1000  # per expression
VARIABLES: dict[str, Kind] = {
    "state": "float",  # the numbers of the statistics, by index
    "mass": "float",  # attention received, summed over query heads
    "most": "float",  # its maximum over query heads
    "rank": "int",
    "position": "int",
    "step": "int",
    "layer": "int",
    "head": "int",
    "count": "int",  # tokens that the KV head holds
    "prompt": "int",
    "group": "int",  # query heads of a KV head
    "num_layers": "int",
}


class NotTraceableError(TypeError):
    """A policy uses an operation that the compiled walk does not support."""


@dataclass(frozen=True)
class Dialect:
    """Syntax of one language, as format strings of operands."""

    where: str
    negated: str  # logical not
    single: str  # cast to float32
    integer: str  # cast to int64
    state: str  # a number of the statistics
    divided: str  # of float32, rounded as IEEE 754 demands
    root: str
    exponential: str
    logarithm: str
    number: Callable[[int], str]
    fraction: Callable[[float], str]


C = Dialect(
    "({0} ? {1} : {2})",
    "(!{0})",
    "((float){0})",
    "((int64_t){0})",
    "state.of[{0}]",
    "({0} / {1})",
    "sqrtf({0})",
    "expf({0})",
    "logf({0})",
    lambda x: f"{x}LL",
    lambda x: {"inf": "INFINITY", "-inf": "(-INFINITY)", "nan": "NAN"}.get(repr(x), f"((float){x!r})"),
)
TRITON = Dialect(
    "tl.where({0}, {1}, {2})",
    "({0} == 0)",
    "tl.cast({0}, tl.float32)",
    "tl.cast({0}, tl.int64)",
    "state[{0}]",
    "tl.div_rn({0}, {1})",
    "tl.sqrt_rn({0})",
    "tl.exp({0})",
    "tl.log({0})",
    str,
    lambda x: repr(x) if isfinite(x) else f'float("{x}")',
)


class Expression:
    """A variable, a number, or an operation on other expressions.

    Attributes:
        kind: dtype in PyTorch: a mask, an int64 or a float32.
        reads: variables in the expression.
    """

    def __init__(self, kind: Kind, form: str, *operands: Expression | float, reads: str = "") -> None:
        """Record an operation.

        Args:
            form: format string of the operands, or name of a field of `Dialect`.
            operands: expressions and numbers.
            reads: variable that the operation itself reads; empty if none.

        Raises:
            NotTraceableError: the expression has too many operations.
        """
        self.kind, self._form, self._operands = kind, form, operands
        inner = [x for x in operands if isinstance(x, Expression)]
        self.reads: frozenset[str] = frozenset([reads] if reads else []).union(*(x.reads for x in inner))
        self._operations: int = 1 + sum(x._operations for x in inner)
        if self._operations > _MAX_OPERATIONS:
            raise NotTraceableError(f"an expression of more than {_MAX_OPERATIONS} operations")

    def source(self, dialect: Dialect) -> str:
        """Return the source code of the expression in one language."""
        texts = [x.source(dialect) if isinstance(x, Expression) else _literal(x, dialect) for x in self._operands]
        return getattr(dialect, self._form, self._form).format(*texts)

    def to(self, kind: Kind) -> Expression:
        """Return the expression converted to another dtype."""
        if kind == self.kind:
            return self
        if self._form == "{0}" and kind == "float":
            return number(float(self._operands[0]))  # type: ignore[arg-type]
        if kind == "bool":
            return Expression("bool", "({0} != {1})", self, number(0).to(self.kind))
        return Expression(kind, "single" if kind == "float" else "integer", self)


def _literal(value: float, dialect: Dialect) -> str:
    if isinstance(value, bool):
        return f"({int(value)} == 1)"
    return dialect.fraction(value) if isinstance(value, float) else dialect.number(int(value))


def number(value: float) -> Expression:
    """Return the expression of a number that is known when the policy is traced."""
    return Expression("bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float", "{0}", value)


def variable(name: str) -> Expression:
    """Return the expression of one of `VARIABLES`, except the state."""
    return Expression(VARIABLES[name], name, reads=name)


def state(index: int) -> Expression:
    """Return the expression of a number of the statistics. index: over the numbers of all statistics."""
    return Expression("float", "state", index, reads="state")


def uniform() -> Expression:
    """Return the expression of `CacheView.uniform`."""
    return Expression("float", "uniform(position, head, layer, seed)", reads="head")


def _promoted(*operands: Expression) -> Kind:
    return max((x.kind for x in operands), key=_KINDS.index)


def _binary(form: str, kinds: tuple[Kind, ...], result: Kind | None = None) -> Build:
    """Define an operation on two operands of one dtype, which must be in `kinds`. result: dtype; the operands' when None."""

    def build(a: Expression, b: Expression) -> Expression:
        kind = _promoted(a, b)
        if kind not in kinds:
            raise NotTraceableError(f"'{form.format('x', 'y')}' of {kind} tensors")
        return Expression(result or kind, form, a.to(kind), b.to(kind))

    return build


def _of_floats(form: str) -> Build:
    return lambda *operands: Expression("float", form, *(x.to("float") for x in operands))


def where(mask: Expression, a: Expression, b: Expression) -> Expression:
    """`torch.where`."""
    if mask.kind != "bool":
        raise NotTraceableError(f"a choice by {mask.kind} tensors")
    kind = _promoted(a, b)
    return Expression(kind, "where", mask, a.to(kind), b.to(kind))


def masked_fill(x: Expression, mask: Expression, value: Expression) -> Expression:
    """`Tensor.masked_fill`."""
    if _promoted(x, value) != x.kind:
        raise NotTraceableError(f"{x.kind} tensors filled with a {value.kind} number")
    return where(mask, value.to(x.kind), x)


def minimum(a: Expression, b: Expression) -> Expression:
    """`torch.minimum`."""
    return where(BINARY["lt"](b, a), b, a)


def maximum(a: Expression, b: Expression) -> Expression:
    """`torch.maximum`."""
    return where(BINARY["gt"](b, a), b, a)


def absolute(x: Expression) -> Expression:
    """`torch.abs`."""
    return where(BINARY["lt"](x, number(0)), negative(x), x)


def negative(x: Expression) -> Expression:
    """`torch.neg`."""
    if x.kind == "bool":
        raise NotTraceableError("'-x' of bool tensors")
    return Expression(x.kind, "(-{0})", x)


def inverse(x: Expression) -> Expression:
    """`~` of a mask."""
    if x.kind != "bool":
        raise NotTraceableError(f"'~x' of {x.kind} tensors")
    return Expression("bool", "negated", x)


root, exponential, logarithm, divided = (_of_floats(form) for form in ("root", "exponential", "logarithm", "divided"))

_NUMBERS: tuple[Kind, ...] = ("int", "float")
BINARY: dict[str, Build] = {  # by the names of Python's operators
    "add": _binary("({0} + {1})", _NUMBERS),
    "sub": _binary("({0} - {1})", _NUMBERS),
    "mul": _binary("({0} * {1})", _NUMBERS),
    "truediv": divided,
    "floordiv": _binary("floor_quotient({0}, {1})", ("int",)),
    "mod": _binary("floor_remainder({0}, {1})", ("int",)),
    "lt": _binary("({0} < {1})", _KINDS, "bool"),
    "le": _binary("({0} <= {1})", _KINDS, "bool"),
    "gt": _binary("({0} > {1})", _KINDS, "bool"),
    "ge": _binary("({0} >= {1})", _KINDS, "bool"),
    "eq": _binary("({0} == {1})", _KINDS, "bool"),
    "ne": _binary("({0} != {1})", _KINDS, "bool"),
    "and": _binary("({0} & {1})", ("bool", "int")),
    "or": _binary("({0} | {1})", ("bool", "int")),
    "xor": _binary("({0} ^ {1})", ("bool", "int")),
}
