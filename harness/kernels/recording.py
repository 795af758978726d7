"""Stand-ins for tensors that record the elementwise operations of a policy. Any other operation raises an error.

Axis letters: B streams, H KV heads, S slots, k numbers of a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.kernels import expressions
from kvbench.harness.kernels.expressions import BINARY, Build, Expression, Kind, NotTraceableError

_DTYPES: dict[Any, Kind] = {torch.bool: "bool", torch.int64: "int", torch.float32: "float"}
_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
_METHODS = {  # that are also functions of torch
    "abs",
    "amax",
    "amin",
    "clamp",
    "exp",
    "log",
    "masked_fill",
    "maximum",
    "mean",
    "minimum",
    "pow",
    "sqrt",
    "square",
    "sum",
    "unbind",
}
_ALIASES = {"div": "truediv", "true_divide": "truediv", "floor_divide": "floordiv", "remainder": "mod", "neg": "neg"}


class Traced:
    """Stand-in for a tensor [B, H, S], or [B, H, S, k] with one expression for each element of the last axis."""

    device = torch.device("cpu")  # on which policies may create constants

    def __init__(self, elements: Sequence[Expression], has_axis: Any = False) -> None:
        """Wrap expressions. has_axis: the tensor has a last axis."""
        self.elements, self.has_axis = tuple(elements), has_axis

    @classmethod
    def of(cls, value: Any) -> Traced:
        """Convert an operand: a stand-in, a number, or a constant tensor of at most one axis.

        Raises:
            NotTraceableError: the operand has another type.
        """
        if isinstance(value, Traced):
            return value
        if isinstance(value, Tensor) and value.dim() <= 1:
            return cls([expressions.number(x) for x in value.reshape(-1).tolist()], value.dim() == 1)
        if not isinstance(value, (int, float)):
            raise NotTraceableError(f"an operand of type {type(value).__name__}")
        return cls([expressions.number(value)])

    @property
    def single(self) -> Expression:
        """The expression of a tensor without a last axis.

        Raises:
            NotTraceableError: the tensor has a last axis.
        """
        if self.has_axis:
            raise NotTraceableError("several numbers per slot where one is expected")
        return self.elements[0]

    def dim(self) -> int:
        """`Tensor.dim`."""
        return 4 if self.has_axis else 3

    def to(self, dtype: Any) -> Traced:
        """`Tensor.to`."""
        if dtype not in _DTYPES:
            raise NotTraceableError(f"'to({dtype})' of a tensor")
        return _each(lambda x: x.to(_DTYPES[dtype]), self)

    def float(self) -> Traced:
        """`Tensor.float`."""
        return self.to(torch.float32)

    def long(self) -> Traced:
        """`Tensor.long`."""
        return self.to(torch.int64)

    def bool(self) -> Traced:
        """`Tensor.bool`."""
        return self.to(torch.bool)

    def abs(self) -> Traced:
        """`Tensor.abs`."""
        return _each(expressions.absolute, self)

    def sqrt(self) -> Traced:
        """`Tensor.sqrt`."""
        return _each(expressions.root, self)

    def exp(self) -> Traced:
        """`Tensor.exp`."""
        return _each(expressions.exponential, self)

    def log(self) -> Traced:
        """`Tensor.log`."""
        return _each(expressions.logarithm, self)

    def square(self) -> Traced:
        """`Tensor.square`."""
        return _each(BINARY["mul"], self, self)

    def pow(self, exponent: Any) -> Traced:
        """`Tensor.pow`, for exponents 2 and 0.5."""
        if exponent not in (2, 0.5):
            raise NotTraceableError(f"a power of {exponent}")
        return self.square() if exponent == 2 else self.sqrt()

    def clamp(self, min: Any = None, max: Any = None) -> Traced:  # noqa: A002
        """`Tensor.clamp`."""
        low = self if min is None else self.maximum(min)
        return low if max is None else low.minimum(max)

    def minimum(self, other: Any) -> Traced:
        """`Tensor.minimum`."""
        return _each(expressions.minimum, self, other)

    def maximum(self, other: Any) -> Traced:
        """`Tensor.maximum`."""
        return _each(expressions.maximum, self, other)

    def masked_fill(self, mask: Any, value: Any) -> Traced:
        """`Tensor.masked_fill`."""
        return _each(expressions.masked_fill, self, mask, value)

    def where(self, condition: Any, other: Any) -> Traced:
        """`Tensor.where`."""
        return _each(expressions.where, condition, self, other)

    def sum(self, dim: Any, keepdim: Any = False) -> Traced:
        """`Tensor.sum`."""
        counted = _each(lambda x: x.to("int") if x.kind == "bool" else x, self)
        return counted._reduced(BINARY["add"], dim, keepdim)

    def mean(self, dim: Any, keepdim: Any = False) -> Traced:
        """`Tensor.mean`."""
        return _each(BINARY["truediv"], self.sum(dim, keepdim), len(self.elements))

    def amax(self, dim: Any, keepdim: Any = False) -> Traced:
        """`Tensor.amax`."""
        return self._reduced(expressions.maximum, dim, keepdim)

    def amin(self, dim: Any, keepdim: Any = False) -> Traced:
        """`Tensor.amin`."""
        return self._reduced(expressions.minimum, dim, keepdim)

    def unbind(self, dim: Any) -> tuple[Traced, ...]:
        """`Tensor.unbind`."""
        return tuple(Traced([x]) for x in self._along(dim))

    def _along(self, dim: Any) -> tuple[Expression, ...]:
        """Return the elements along the last axis.

        Raises:
            NotTraceableError: `dim` is the axis of slots, heads or streams.
        """
        if not self.has_axis or dim not in (-1, 3):
            raise NotTraceableError("an operation that compares slots, heads or streams")
        return self.elements

    def _reduced(self, build: Build, dim: Any, keepdim: Any) -> Traced:
        return Traced([reduce(build, self._along(dim))], keepdim)

    def __getitem__(self, index: Any) -> Traced:
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
            if index[1] is None and not self.has_axis:
                return Traced(self.elements, True)
            if isinstance(index[1], int) and self.has_axis:
                return Traced([self.elements[index[1]]])
            if isinstance(index[1], slice) and self.has_axis:
                return Traced(self.elements[index[1]], True)
        raise NotTraceableError("an index of a tensor other than [..., i] of its last axis")

    def __pow__(self, exponent: Any) -> Traced:
        return self.pow(exponent)

    def __neg__(self) -> Traced:
        return _each(expressions.negative, self)

    def __invert__(self) -> Traced:
        return _each(expressions.inverse, self)

    def __bool__(self) -> Any:
        raise NotTraceableError("a branch that depends on a tensor")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"'{name}' of a tensor")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle functions of torch, and operators whose left operand is a tensor."""
        name = getattr(function, "__name__", str(function)).strip("_")
        name, given = _ALIASES.get(name, name), kwargs or {}
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*args, **given)
        if name in _METHODS or name in BINARY or name == "neg":
            method = name if name in _METHODS else f"__{name}__"
            return getattr(cls.of(args[0]), method)(*args[1:], **given)
        raise NotTraceableError(name)


def _each(build: Build, *operands: Any) -> Traced:
    """Apply an operation to every element, broadcasting along the last axis."""
    traced = [Traced.of(x) for x in operands]
    has_axis = any(x.has_axis for x in traced)
    constants = [not isinstance(x, (Traced, Tensor)) for x in operands]
    if any(x.has_axis != has_axis and not constant for x, constant in zip(traced, constants, strict=True)):
        raise NotTraceableError("tensors with and without a last axis in one operation")
    length = max(len(x.elements) for x in traced)
    if any(len(x.elements) not in (1, length) for x in traced):
        raise NotTraceableError("tensors of different sizes in one operation")
    return Traced([build(*(x.elements[i % len(x.elements)] for x in traced)) for i in range(length)], has_axis)


def _like(value: Any) -> Callable[..., Traced]:
    """Define `torch.full_like`, or a function with a fixed value. value: None for `full_like`."""

    def build(x: Traced, fill_value: Any = value, dtype: Any = None) -> Traced:
        like = Traced([expressions.number(fill_value).to(e.kind) for e in x.elements], x.has_axis)
        return like if dtype is None else like.to(dtype)

    return build


def _stack(tensors: Sequence[Any], dim: Any = 0) -> Traced:
    if dim not in (-1, 3):
        raise NotTraceableError("'stack' along another axis than a new last one")
    return Traced([x.single for x in map(Traced.of, tensors)], True)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": lambda condition, x, other: _each(expressions.where, condition, x, other),
    "full_like": _like(None),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "stack": _stack,
}


def _operator(name: str, reflected: bool) -> Callable[[Traced, Any], Traced]:
    if reflected:
        return lambda self, other: _each(BINARY[name], other, self)
    return lambda self, other: _each(BINARY[name], self, other)


for _name in BINARY:
    setattr(Traced, f"__{_name}__", _operator(_name, reflected=False))
    if _name in _REFLECTED:
        setattr(Traced, f"__r{_name}__", _operator(_name, reflected=True))
