"""CPU kernels of a step (`step.c`, `coded_step.c`, `release.c`) and of a block, with the interfaces that the walk calls.

Axis letters: B streams, H KV heads, N = B * H, R rows of all layers, G query heads of a KV head, S slots attended, D key dim,
E value dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.harness.core.codec import Kivi
from kvbench.harness.engine.rotary import LONGEST_STREAM
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.kernels.compiler import Built, built, built_of, built_without_policy, why_untraced
from kvbench.harness.kernels.cpu_walk import CpuWalkKernel, why_not_walked
from kvbench.harness.kernels.states import heads_of, may_outlive_window, prompts_of, why_unserved
from kvbench.harness.kernels.tracing import traced
from kvbench.policies import PositionMode
from kvbench.policies.merges import Merging
from kvbench.policies.view import mixed_seed

__all__ = ["KERNELS", "CpuReleaseKernel", "CpuStepKernel", "CpuWalkKernel", "lost", "why_not_walked"]

_MODES = {"cache": 0, "stream": 1, "clamped": 2, "rotated": 3}  # `rotated`: `stream` with keys that are stored rotated
_MAX_SINGLE_THREAD_PRODUCTS = 2**17  # of a layer's scores; with fewer, one thread is faster than several


class CpuStepKernel:
    """Decode step in the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None, kernel: Any) -> None:
        self._kernel, self._limit, self._longest, self.gives_logits = kernel, limit, longest, slots.codec is None
        self._exempt: tuple[int, ...] = ()
        self._split: list[Tensor] = []
        if slots.codec is not None:
            self._exempt = slots.codec.sinks, slots.codec.recent
            if slots.shape.rotation is not None:  # both tables, as cosines and then sines
                tables = slots.shape.rotation.tables(torch.float32, LONGEST_STREAM)[:2]
                self._split = [torch.cat([x.real, x.imag], 1) for x in tables if x is not None]
        self._mode = _MODES["rotated" if slots.keys_rotated else mode]
        self._order = torch.arange(slots.shape.key_dim) if slots.shape.rotation is None else slots.shape.rotation.order

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """Return the kernel for the layers of some slots; None if there is none.

        Args:
            mode: position mode.
            limit: largest distance in mode `clamped`, in tokens.
            longest: upper bound of the angles; the number of slots when None.
        """
        kernel = cls.built(slots).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        arrays = 15 if slots.codec is None else 19
        kernel.argtypes = [*[ctypes.c_void_p] * arrays, *[ctypes.c_int64] * 10, ctypes.c_float]
        return cls(slots, mode, limit, longest, kernel)

    @staticmethod
    def built(slots: Slots) -> Built:
        """Build the C function. Unsupported layers (no plain softmax, uncoded 16 bits) get neither function nor reason."""
        shape, codec = slots.shape, slots.codec
        if not shape.plain_softmax or may_outlive_window(slots):
            return Built()
        sizes = {"GROUP": shape.group, "KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim}
        if codec is None:
            return built("step.c", "step", _texts(sizes)) if slots.dtype == torch.float32 else Built()
        if isinstance(codec, Kivi) or slots.dtype not in (torch.float32, torch.bfloat16):
            return Built()
        sizes |= {"KEY_CHANNELS": min(codec.group, shape.key_dim), "VALUE_CHANNELS": min(codec.group, shape.value_dim)}
        sizes |= {"CODE_BITS": codec.bits, "STORED_IN_16_BITS": int(slots.dtype == torch.bfloat16)}
        return built("coded_step.c", "coded_step", _texts(sizes))

    def __call__(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float,
        mass: Tensor | None, logits: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Read a token of each stream in one layer. Arguments and result are those of `kernel_interface.StepKernel`.

        Raises:
            MemoryError: there is no scratch memory.
        """
        size, attended = rows.rank.shape
        low = high = None
        level = 1
        if slots.shape.rotation is not None:
            low, high, level = slots.shape.rotation.tables(torch.float32, self._longest or slots.num_slots + 1)
            if slots.codec is not None:
                low, high = self._split[0], None if high is None else self._split[1]
        out = torch.empty(*query.shape[:3], value.shape[-1])
        new = (x.float().contiguous() for x in (query, key, value))
        table, wanted = ((rows.page_table,), (mass, logits)) if slots.codec is None else ((), (mass,))
        arrays = (*new, self._order, *rows.stored, *table, rows.rank, rows.position, rows.free, low, high, out, *wanted)
        threads = torch.get_num_threads() if query.numel() * attended > _MAX_SINGLE_THREAD_PRODUCTS else 1
        failed = self._kernel(
            *(None if x is None else x.data_ptr() for x in arrays),
            size,
            rows.base,
            slots.num_slots,
            attended,
            self._mode,
            self._limit,
            level,
            min(threads, size),
            *(self._exempt or rows.page_shape),
            scaling,
        )
        if failed:
            raise MemoryError("no scratch memory for a decode step")
        return out.to(query.dtype)


def _texts(sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Return the substitutions that `built` makes in a template."""
    return tuple((name, str(size)) for name, size in sizes.items())


class CpuReleaseKernel:
    """Bookkeeping after a token, for the rows of one layer or of all layers.

    Attributes:
        updates: the kernel contains the policy's code and also updates statistics. Otherwise PyTorch computes importance.
    """

    def __init__(self, kernel: Any, reads: frozenset[str] | None) -> None:
        """Wrap a function. reads: variables in the policy's code; None if the kernel does not contain this code."""
        self._kernel, self._reads, self.updates = kernel, reads or frozenset(), reads is not None

    @classmethod
    def from_slots(cls, slots: Slots) -> Self | None:
        """Return the kernel for the layers of some slots; None if there is none."""
        kernel = cls.built(slots).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 10, *[ctypes.c_int64] * 12]
        return cls(kernel, traced(slots.policy).reads if cls._is_traceable(slots) else None)

    @staticmethod
    def _is_traceable(slots: Slots) -> bool:
        return slots.state_dtype == torch.float32 and not why_untraced(slots.policy)

    @classmethod
    def built(cls, slots: Slots) -> Built:
        """Build the C function. Slots with statistics per head, or without a kernel, get neither function nor reason."""
        if slots.capacity is None or any(s.per == "head" for s in slots.tensors.states) or why_unserved(slots):
            return Built()
        if isinstance(slots.policy, Merging):
            return Built()
        if cls._is_traceable(slots):
            return built_of(slots.policy, "release.c", "release")
        return built_without_policy("release.c", "release")

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Update the statistics and choose the next token's slot. Arguments are those of `kernel_interface.ReleaseKernel`.

        Raises:
            MemoryError: there is no scratch memory.
        """
        importance = None if self.updates or not full else rows.importance(slots.policy, full=True).float().contiguous()
        of_kernel = slots.tensors.states.values() if self.updates else ()
        numbers = [x.data_ptr() + i * x.itemsize for x in of_kernel for i in range(x.stride(1))]
        states = (ctypes.c_void_p * len(numbers))(*numbers)
        head = heads_of(rows) if "head" in self._reads else None
        prompt = prompts_of(rows) if "prompt" in self._reads else None
        layers = slots.layer_index[rows.base // (slots.rows * slots.num_slots) :]
        before = importance, mass if self.updates else None
        arrays = (rows.rank, rows.position, layers, head, prompt, step, rows.free)
        failed = self._kernel(
            *(None if x is None else x.data_ptr() for x in before),
            states,
            *(None if x is None else x.data_ptr() for x in arrays),
            rows.base,
            len(rows.rank),
            slots.streams * slots.shape.heads,
            slots.shape.heads,
            slots.shape.group,
            slots.num_slots,
            rows.rank.shape[1],
            slots.every if full else 0,
            slots.every,
            slots.shape.sliding_window or 0,
            slots.num_layers,
            mixed_seed(slots.seed),
        )
        if failed:
            raise MemoryError("no scratch memory for the bookkeeping of a decode step")


def lost(slots: Slots, mode: PositionMode, limit: int) -> str:
    """Return the reason that a kernel for these layers and their policy could not be built; empty if all were built."""
    kernels = (CpuStepKernel.built(slots), CpuReleaseKernel.built(slots), CpuWalkKernel.built(slots, mode, limit))
    return next((kernel.why_not for kernel in kernels if kernel.why_not), "")


KERNELS = CpuStepKernel, CpuReleaseKernel, CpuWalkKernel  # read by `choose`
