"""A decode step's attention by one C loop: the new token written, keys turned as they are read, nothing of their size made.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, S slots looked at, D key dim, E value dim.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch
from torch import Tensor

from harness.engine.kernels.compiler import compiler, function
from harness.engine.slots import Rows, Slots
from policies import PositionMode

_ARRAYS, _NUMBERS = 13, 8  # arguments of the kernel: arrays, and integers before `scaling`
_MODES: dict[PositionMode, int] = {"cache": 0, "stream": 1, "clamped": 2}
_ALONE = 2**17  # products of a layer's scores below which one thread is quicker than several


class StepKernel:
    """The decode step of the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None, kernel: Any) -> None:
        """As `of` makes it."""
        self._kernel, self._mode, self._limit, self._longest = kernel, _MODES[mode], limit, longest
        self._order = torch.arange(slots.shape.key_dim) if slots.shape.rotation is None else slots.shape.rotation.order

    @classmethod
    def of(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """None where there is none: it is for CPUs, float32, and softmax of plain scores.

        Args:
            slots: of the layers.
            mode: where RoPE puts a cached token.
            limit: the largest distance of mode `clamped`, in tokens.
            longest: bounds the angles; the number of slots when None.
        """
        shape = slots.shape
        if not shape.plain or slots.keys.device.type != "cpu" or slots.keys.dtype != torch.float32 or not compiler():
            return None
        sizes = (("GROUP", str(shape.group)), ("KEY_DIM", str(shape.key_dim)), ("VALUE_DIM", str(shape.value_dim)))
        kernel = function("step.c", "step", sizes)
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * _ARRAYS, *[ctypes.c_int64] * _NUMBERS, ctypes.c_float]
        return cls(slots, mode, limit, longest, kernel)

    def __call__(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float, mass: Tensor | None
    ) -> Tensor:
        """Take a token into one layer, each stream's; its rank and position are in its slot already.

        Args:
            slots: of the layer.
            rows: of the layer.
            query: unrotated, in the model's order of dims. [B, H * G, 1, D].
            key: likewise. [B, H, 1, D].
            value: [B, H, 1, E].
            scaling: of the scores.
            mass: where to put the softmax weights; None if nobody asks. [N, G, S].

        Returns:
            [B, H * G, 1, E].

        Raises:
            MemoryError: no scratch memory.
        """
        size, attended = rows.rank.shape
        low = high = None
        level = 1
        if slots.shape.rotation is not None:
            low, high, level = slots.shape.rotation.tables(torch.float32, self._longest or slots.empty + 1)
        out = torch.empty(*query.shape[:3], value.shape[-1])
        arrays = (
            query.contiguous(), key.contiguous(), value.contiguous(), self._order, rows.keys, rows.values, rows.rank,
            rows.position, rows.free, low, high, out, mass,
        )  # fmt: skip
        threads = torch.get_num_threads() if query.numel() * attended > _ALONE else 1
        failed = self._kernel(
            *(None if x is None else x.data_ptr() for x in arrays), size, rows.first, slots.empty, attended, self._mode,
            self._limit, level, min(threads, size), scaling,
        )  # fmt: skip
        if failed:
            raise MemoryError("no scratch memory for a decode step")
        return out
