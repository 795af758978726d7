"""Bookkeeping for heads that hold different numbers of tokens (`compete.c`), with the interface that the walk calls.

Axis letters: R rows of one layer or of all layers, G query heads of a KV head, S slots.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.kernels.compiler import Built, built_of, built_without_policy, why_untraced
from kvbench.harness.kernels.states import heads_of, may_outlive_window, prompts_of
from kvbench.policies.merges import Merging
from kvbench.policies.view import mixed_seed


class _Held(ctypes.Structure):
    """`Held` of compete.c."""

    _fields_ = (("first", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class CompeteKernel:
    """Evicts from the rows of a pool, for one layer or for all layers of one `Slots`.

    Attributes:
        updates: the kernel also updates the statistics; otherwise they are updated before.
    """

    def __init__(self, kernel: Any, updates: bool) -> None:
        self._kernel, self.updates = kernel, updates

    @classmethod
    def from_slots(cls, slots: Slots) -> Self | None:
        """Return the kernel for the layers of some slots; None if there is none."""
        kernel = cls.built(slots).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 14, *[ctypes.c_int64] * 17]
        return cls(kernel, cls._traceable(slots))

    @staticmethod
    def _traceable(slots: Slots) -> bool:
        """Return whether the kernel can contain the policy's code."""
        same = list(slots.tensors.states) == list(dict.fromkeys(slots.policy.statistics))
        return same and not may_outlive_window(slots) and not why_untraced(slots.policy)

    @classmethod
    def built(cls, slots: Slots) -> Built:
        """Build the C function. It serves pools from which tokens are evicted, not merged, without statistics per head."""
        summed = any(s.per == "head" for s in slots.tensors.states)
        if slots.tensors.pool is None or slots.capacity is None or slots.state_dtype != torch.float32:
            return Built()
        if summed or isinstance(slots.policy, Merging):
            return Built()
        if cls._traceable(slots):
            return built_of(slots.policy, "compete.c", "compete")
        return built_without_policy("compete.c", "compete")

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Evict tokens, and choose the next token's slot. Arguments are those of `kernel_interface.ReleaseKernel`.

        Raises:
            MemoryError: there is no scratch memory.
        """
        tensors, floor = slots.tensors, slots.budget.floor
        assert tensors.pool is not None
        assert tensors.pages is not None
        importance = None if self.updates or not full else rows.importance(slots.policy).float().contiguous()
        states = [x.flatten(0, 1) for x in rows.states.values()]  # views: the first two axes are those of the rows
        numbers = [x.data_ptr() + i * x.itemsize for x in states for i in range(x.stride(1))] if self.updates else []
        of_slots = (_Held * (1 + len(states)))(*map(_held, (rows.position, *states)))
        of_pool = (_Held * 2)(*(_held(x.tensor.flatten(0, 1)[None]) for x in tensors.pool))
        layers = slots.layer_index[rows.base // (slots.rows * slots.num_slots) :]
        before = (rows.rank, rows.position, layers, heads_of(rows), prompts_of(rows), step, rows.free)
        freed = self._kernel(
            _pointer(importance),
            _pointer(mass) if self.updates else None,
            (ctypes.c_void_p * len(numbers))(*numbers),
            *map(_pointer, before),
            of_slots,
            of_pool,
            _pointer(rows.page_table),
            _pointer(rows.budgets) if floor is None else None,
            rows.base,
            len(of_slots),
            *rows.page_shape,
            len(rows.rank),
            slots.rows,
            slots.shape.heads,
            slots.shape.group,
            slots.num_slots,
            rows.rank.shape[1],
            int(full),
            slots.every,
            slots.capacity,
            -1 if floor is None else floor,
            slots.shape.sliding_window or 0,
            slots.num_layers,
            mixed_seed(slots.seed),
        )
        if freed < 0:
            raise MemoryError("no scratch memory for the bookkeeping of a decode step")
        if freed:
            tensors.pages.note_owners()


def _held(x: Tensor) -> _Held:
    """Return the address and the stride per slot, in bytes, of a tensor. [R, S, ...]."""
    return _Held(x.data_ptr(), x.stride(1) * x.itemsize)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
