"""C functions with a policy's own expressions in them, and the one that does a decode step's bookkeeping."""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch
from torch import Tensor

from harness.engine.kernels.compiler import compiler, function
from harness.engine.kernels.tracing import NotTraceableError, traced
from harness.engine.slots import Rows, Slots
from policies import Policy
from policies.policy import mixed_seed

_ARRAYS, _NUMBERS = 7, 9  # arguments of `release`


def why_not(policy: Policy) -> str:
    """Why a bound policy has no compiled walk; empty if it has one, as far as can be told without building it."""
    try:
        traced(policy)
    except NotTraceableError as error:
        return f"{error} can't be compiled"
    return "" if compiler() else "no C compiler (cc)"


def function_of(policy: Policy, template: str, name: str) -> Any:
    """A C function with a bound policy's expressions put in, as `compiler.function`; None if there is none."""
    if why_not(policy):
        return None
    importance, update = traced(policy)
    return function(template, name, (("(IMPORTANCE)", f"({importance})"), ("(UPDATE)", f"({update})")))


class ReleaseKernel:
    """The bookkeeping after a token, for all layers of one `Slots` at once."""

    def __init__(self, kernel: Any) -> None:
        """As `of` makes it."""
        self._kernel = kernel

    @classmethod
    def of(cls, slots: Slots) -> Self | None:
        """None where there is none: for CPUs, float32 statistics, and policies that can be traced."""
        fits = slots.capacity is not None and slots.rank.device.type == "cpu" and slots.wide == torch.float32
        kernel = function_of(slots.policy, "release.c", "release") if fits else None
        if kernel is None:
            return None
        kernel.restype = None
        kernel.argtypes = [*[ctypes.c_void_p] * _ARRAYS, *[ctypes.c_int64] * _NUMBERS]
        return cls(kernel)

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Statistics updated, and the next token's slot found.

        Args:
            slots: of the layers.
            rows: of all of them.
            mass: softmax weights, where the policy keeps a statistic. [R, G, S].
            step: of the token. [R] int64.
            full: every stream evicts a token; none does otherwise.
        """
        state = next(iter(slots.states.values()), None)
        arrays = (mass, state, slots.rank, slots.position, slots.layer_index, step, slots.free)
        self._kernel(
            *(None if x is None else x.data_ptr() for x in arrays), len(slots.rank), slots.streams * slots.shape.heads,
            slots.shape.heads, slots.shape.group, slots.empty, rows.rank.shape[1], int(full),
            slots.shape.sliding_window or 0, mixed_seed(slots.seed),
        )  # fmt: skip
