"""Attention of a token on CUDA over K and V stored as packed integers: launches `attend_coded` of `triton_coded.py`.

Axis letters: N rows (stream, KV head), G query heads of a KV head, S slots, D key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
from torch import Tensor

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import LayerShape, Slots
from kvbench.harness.kernels.cuda_attention import WARPS, AttentionKernels, next_power, sizes
from kvbench.policies import PositionMode


def serves(slots: Slots) -> bool:
    """Return whether the kernel supports the slots' codec: `int8`, `int4` or `int2`, in groups that are powers of two."""
    codec, dims = slots.codec, (slots.shape.key_dim, slots.shape.value_dim)
    if codec is None or isinstance(codec, Kivi) or slots.dtype not in (torch.float32, torch.bfloat16):
        return False
    return all(next_power(size) == size > 1 for size in (min(codec.group, d) for d in dims))


def constants(shape: LayerShape, codec: Codec) -> dict[str, int]:
    """Return the kernel's constants. Codes become float32 in registers, so blocks larger than for float32 would spill."""
    return sizes(shape, torch.float32) | {
        "BITS": codec.bits, "KEY_CHANNELS": min(codec.group, shape.key_dim), "VALUE_CHANNELS": min(codec.group, shape.value_dim),
        "SINKS": codec.sinks, "RECENT": codec.recent,
    }  # fmt: skip


class CodedAttentionKernels(AttentionKernels):
    """`attend_coded` and `join` for the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        super().__init__(slots, mode, limit, longest)
        assert slots.codec is not None
        self._codec, self._sizes = slots.codec, constants(slots.shape, slots.codec)

    def launcher(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float, mass: Tensor | None,
        out: Tensor, clock: Tensor | None = None, written: Tensor | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        """Return a function that launches both kernels for one token of each row, which must be entered before."""
        assert clock is None, "a coded cache is not walked by kernels"
        from kvbench.harness.kernels.triton_coded import attend_coded

        self._grow(slots)
        (size, attended), rope, group = rows.rank.shape, self._rope, slots.shape.group
        parts, part = self.parts(size, attended)
        parted = query.new_empty(size, parts, group, slots.shape.value_dim, dtype=torch.float32)
        most, total = (query.new_empty(size, parts, group, dtype=torch.float32) for _ in range(2))
        scores = most if mass is None else mass
        key_codes, *others = rows.stored
        key_codes = key_codes.view(torch.int16) if self._codec.bits == 8 else key_codes
        grid = (size, parts, ceil(group / self._sizes["M"]))
        attend = partial(
            attend_coded[grid], query, key, value, rope.order, key_codes, *others, rows.rank, rows.position, rows.free,
            *rope.tables, parted, most, total, scores, rows.base, slots.num_slots, attended, part, self._limit, scaling,
            MODE=rope.mode, LEVEL=rope.level, ASKED=mass is not None, num_warps=WARPS[slots.dtype], **self._sizes,
        )  # fmt: skip
        joining = (parted, most, total, scores, out, rows.free, attended, parts, 1)
        join = self.joining(size, attended, *joining, ASKED=mass is not None, PLACE=False)

        def launch() -> None:
            attend()
            join()

        return launch
