"""Types, numbers and elementwise operations of PyTorch, in C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf, isnan
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.kernels.expressions import NotTraceableError

_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "int64_t", torch.bool: "uint8_t"}
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "and": "&", "or": "|",
    "xor": "^", "lshift": "<<", "rshift": ">>", "logical_and": "&&", "logical_or": "||",
}  # fmt: skip
_FUNCTIONS = {  # of tgmath.h
    "abs": "fabs", "ceil": "ceil", "cos": "cos", "erf": "erf", "exp": "exp", "expm1": "expm1", "floor": "floor", "log": "log",
    "log1p": "log1p", "log2": "log2", "round": "rint", "sin": "sin", "sqrt": "sqrt", "tanh": "tanh",
}  # fmt: skip
_FORMS = {  # of the operands, converted to the type of the result
    "_to_copy": "{0}",
    "clone": "{0}",
    "copy": "{1}",
    "fill": "{1}",
    "logical_not": "(!{0})",
    "maximum": "({1} > {0} ? {1} : {0})",
    "minimum": "({1} < {0} ? {1} : {0})",
    "neg": "(-{0})",
    "reciprocal": "(1 / {0})",
    "relu": "({0} > 0 ? {0} : 0)",
    "rsqrt": "(1 / sqrt({0}))",
    "sigmoid": "(1 / (1 + exp(-{0})))",
}
_FORMS |= {name: f"({{0}} {sign} {{1}})" for name, sign in _OPERATORS.items()}
_FORMS |= {name: f"{function}({{0}})" for name, function in _FUNCTIONS.items()}

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
CHOICES = {"where", "masked_fill"}
ELEMENTWISE = {*_FORMS, *COMPARISONS, *CHOICES, "div", "floor_divide", "remainder", "bitwise_not", "pow"}

_IDENTITIES = {"sum": ("0", "{0} + {1}"), "prod": ("1", "{0} * {1}"), "any": ("0", "{0} | ({1} != 0)")}
_IDENTITIES |= {"all": ("1", "{0} & ({1} != 0)")}
_EXTREMES = {"amax": ">", "amin": "<"}
REDUCTIONS = {*_IDENTITIES, *_EXTREMES}


ARRAYS = {"bmm", "cumsum", "gather", "index_select", "scatter_", "scatter_add_", "sort"}


def is_supported(name: str) -> bool:
    """Return whether an operation, by its name in PyTorch's dispatcher, has a loop of its own."""
    return name in REDUCTIONS or name in ARRAYS or is_elementwise(name)


def is_elementwise(name: str) -> bool:
    """Return whether an operation, perhaps in place, computes every element from one element of each operand."""
    return name.removesuffix("_") in ELEMENTWISE


def type_of(dtype: torch.dtype) -> str:
    """Return the C type of a dtype.

    Raises:
        NotTraceableError: there is none.
    """
    if dtype not in _TYPES:
        raise NotTraceableError(f"a tensor of {dtype}".replace("torch.", ""))
    return _TYPES[dtype]


def literal(value: float, dtype: torch.dtype) -> str:
    """Return a number of a dtype in C."""
    if not dtype.is_floating_point:
        return str(int(value)) if dtype == torch.bool else f"{int(value)}LL" if value > -(2**63) else "INT64_MIN"
    if isnan(value) or isinf(value):
        return "NAN" if isnan(value) else "INFINITY" if value > 0 else "(-INFINITY)"
    return f"(({type_of(dtype)}){float(value)!r})"


def form_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Return the format string of an elementwise operation, except comparisons and choices.

    Args:
        name: name in PyTorch's dispatcher.
        args: operands.
        kwargs: keyword arguments.
        dtype: of the result.

    Raises:
        NotTraceableError: the operation has other options than PyTorch's usual ones.
    """
    whole = dtype == torch.int64
    if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
        return f"({{0}} {_OPERATORS[name]} {literal(kwargs['alpha'], dtype)} * {{1}})"
    if name == "floor_divide" or (name == "div" and kwargs.get("rounding_mode") == "floor"):
        return "floor_quotient({0}, {1})" if whole else "floor({0} / {1})"
    if name == "div" and kwargs.get("rounding_mode") is None:
        return "({0} / {1})"
    if name == "remainder":
        return "floor_remainder({0}, {1})" if whole else "({0} - {1} * floor({0} / {1}))"
    if name == "bitwise_not":
        return "(!{0})" if dtype == torch.bool else "(~{0})"
    if name == "abs" and whole:
        return "({0} < 0 ? -{0} : {0})"
    if name == "pow" and not whole:
        power = -2 if isinstance(args[1], Tensor) else args[1]
        return {2: "({0} * {0})", 0.5: "sqrt({0})", -1: "(1 / {0})"}.get(power, "pow({0}, {1})")
    if name == "exp" and dtype == torch.float32:
        return "exponential({0})"
    if name in _FORMS:
        return _FORMS[name]
    raise NotTraceableError(f"'{name}' of a tensor of {dtype}".replace("torch.", ""))


def reduction_of(name: str, dtype: torch.dtype) -> tuple[str, str]:
    """Return a reduction's result over nothing, and the format string that combines the result so far with an element."""
    if name in _IDENTITIES:
        return _IDENTITIES[name]
    largest, form = name == "amax", f"({{1}} {_EXTREMES[name]} {{0}} ? {{1}} : {{0}})"
    if dtype.is_floating_point:
        return "(-INFINITY)" if largest else "INFINITY", form
    return {torch.bool: "0" if largest else "1"}.get(dtype, "INT64_MIN" if largest else "INT64_MAX"), form
