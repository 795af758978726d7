"""Attention of a token on CUDA: launches kernels of `triton_kernels.py` or, for packed integers, of `triton_coded.py`.

Both kinds are for one `Slots`. `attend` or `attend_coded` reads parts of a cache, and `join` joins the parts.

Axis letters: B streams, H KV heads, N = B * H rows, G query heads of a KV head, T tokens, S slots, D key dim, E value dim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache, partial
from math import ceil
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.engine.rotary import LONGEST_STREAM
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import LayerShape, Slots
from kvbench.harness.kernels.states import numbers_of, widths_of
from kvbench.policies import PositionMode

WARPS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 8}  # per program of `attend`; fewer warps would spill registers
BOOKKEEPING_BLOCK = 1024  # slots
_MAX_TILE_BYTES = 2**14  # of keys or values that a program reads at once; more bytes would spill registers
_PROGRAMS_TO_FILL_CHIP = 264  # two per multiprocessor of an H100, as many as fit into its registers
_PROGRAM_QUERIES = 16  # per program: the side of the smallest tensor-core product
_SMALLEST_SIDE = 16  # of a tensor-core product
_JOINED_PARTS = 16  # parts that `join` reads at once
_TABLE_ROWS = 2**15  # angles; larger angles need a second table
_MODES = {"cache": 1, "stream": 2, "clamped": 3, "rotated": 4}  # `rotated`: mode `stream`, with keys that are stored rotated


@lru_cache
def kernels() -> Any:
    """Return the module with the kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from kvbench.harness.kernels import triton_kernels

    return triton_kernels


class _Rope(NamedTuple):
    """RoPE for the kernels: the mode, the order of dims and the tables."""

    mode: int
    level: int  # rows of each table if two levels are needed; 0 for one level
    order: Tensor
    tables: tuple[Tensor, ...]  # cosine and sine of all angles, and of every `level`-th angle. [rows, D / 2] float32 each

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, longest: int | None) -> Self:
        """Create the tables for the layers of some slots."""
        rotation, device = slots.shape.rotation, slots.device
        if rotation is None:
            return cls(0, 0, torch.arange(slots.shape.key_dim, device=device), (torch.zeros(1, device=device),) * 4)
        near = rotation.cosine_and_sine(_TABLE_ROWS, 1)
        far = rotation.cosine_and_sine(-(-LONGEST_STREAM // _TABLE_ROWS), _TABLE_ROWS)
        level = 0 if (longest or slots.num_slots + 1) <= _TABLE_ROWS else _TABLE_ROWS
        return cls(_MODES["rotated" if slots.keys_rotated else mode], level, rotation.order, near + far)


def sizes(shape: LayerShape, dtype: torch.dtype) -> dict[str, int]:
    """Return the kernels' constants. The sides of matrix products are powers of two. dtype: dtype of the cache."""
    pairs, value_side = (max(_SMALLEST_SIDE, next_power(x)) for x in (shape.key_dim // 2, shape.value_dim))
    block = min(64, max(_SMALLEST_SIDE, _MAX_TILE_BYTES // (max(2 * pairs, value_side) * dtype.itemsize)))
    return {
        "G": shape.group, "M": _PROGRAM_QUERIES, "D": shape.key_dim, "P": pairs, "E": shape.value_dim, "WIDE": value_side,
        "BLOCK": block,
    }  # fmt: skip


def next_power(x: int) -> int:
    """Return the smallest power of two that is at least `x`."""
    return 1 << (x - 1).bit_length()


class AttentionKernels:
    """`attend` and `join` for the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        self._mode, self._limit, self._longest = mode, limit, longest
        self._sizes = sizes(slots.shape, slots.dtype)
        self._rope, self._slots = _Rope.from_slots(slots, mode, longest), slots.num_slots

    def parts(self, size: int, attended: int) -> tuple[int, int]:
        """Return (number of parts of a row, slots per part). size: number of rows."""
        block = self._sizes["BLOCK"]
        wanted = max(1, _PROGRAMS_TO_FILL_CHIP // (size * ceil(self._sizes["G"] / _PROGRAM_QUERIES)))
        part = ceil(ceil(attended / wanted) / block) * block
        return ceil(attended / part), part

    def launcher(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float, mass: Tensor | None,
        out: Tensor, clock: Tensor | None = None, written: Tensor | None = None,
    ) -> Callable[[], None]:  # fmt: skip
        """Return a function that launches both kernels for one token of each row.

        Args:
            query: unrotated, in the model's order of dims. [N, G, T, D].
            key: unrotated, in the model's order of dims. [N, T, D].
            value: [N, T, E].
            mass: receives the softmax weights; None if they are not needed. [N, G, S].
            out: receives the token's output. [N, G, T, E].
            clock: steps of the token and of the first of the T tokens. The kernel then enters the token in its slot. None if T
                is 1 and the token was entered before. [2] int64.
            written: first values of the statistics' numbers, used with a clock. [N, T, K] float32.
        """
        self._grow(slots)
        (size, attended), rope, group, tokens = rows.rank.shape, self._rope, slots.shape.group, query.shape[2]
        parts, part = self.parts(size, attended)
        parted = query.new_empty(size, parts, group, slots.shape.value_dim, dtype=torch.float32)
        most, total = (query.new_empty(size, parts, group, dtype=torch.float32) for _ in range(2))
        scores = most if mass is None else mass
        words = rows.keys.view({2: torch.int32, 4: torch.int64}[rows.keys.dtype.itemsize])
        attending = (
            query, key, value, rope.order, rows.keys, words, rows.values, rows.rank, rows.position,
            arrays_of(rows), rows.free if written is None else written, rows.free, rows.free if clock is None else clock,
            *rope.tables, parted, most, total, scores, rows.base, slots.num_slots, attended, part, self._limit,
            slots.capacity or 0, tokens, scaling, *((0, 0) if written is None else written.stride()[:2]),
        )  # fmt: skip
        joining = (parted, most, total, scores, out, rows.free if clock is None else clock, attended, parts, tokens)
        chunks, options = ceil(group / _PROGRAM_QUERIES), {"ASKED": mass is not None, "PLACE": clock is not None}
        widths = () if written is None else widths_of(rows)
        attend = partial(
            kernels().attend[(size, parts, chunks)], *attending, MODE=rope.mode, LEVEL=rope.level, WIDTHS=widths,
            num_warps=WARPS[rows.keys.dtype], **options, **self._sizes,
        )  # fmt: skip
        join = self.joining(size, attended, *joining, **options)

        def launch() -> None:
            attend()
            join()

        return launch

    def _grow(self, slots: Slots) -> None:
        """Update the RoPE tables after the slots grew, which may require a second table."""
        if slots.num_slots != self._slots:
            self._rope, self._slots = _Rope.from_slots(slots, self._mode, self._longest), slots.num_slots

    def joining(self, size: int, attended: int, *arguments: Any, **options: bool) -> Callable[[], None]:
        """Return a launch of `join`. size: number of rows; arguments: those of `join`, in order; options: ASKED and PLACE."""
        group, blocks = self._sizes["G"], ceil(attended / BOOKKEEPING_BLOCK) if options["ASKED"] else 1
        sized = {"G": group, "E": self._sizes["E"], "WIDE": self._sizes["WIDE"], "CHUNK": _JOINED_PARTS}
        return partial(kernels().join[(size * group, blocks)], *arguments, **sized, BLOCK=BOOKKEEPING_BLOCK, **options)


def arrays_of(rows: Rows) -> tuple[Tensor, ...]:
    """Return the policy's statistics, one array per number; without statistics, an array that is never read. [R, S] each."""
    return tuple(numbers_of(rows)) or (rows.free,)


def serves_coded(slots: Slots) -> bool:
    """Return whether `attend_coded` supports the slots' codec: `int8`, `int4` or `int2`, in groups that are powers of two."""
    codec, dims = slots.codec, (slots.shape.key_dim, slots.shape.value_dim)
    if codec is None or isinstance(codec, Kivi) or slots.dtype not in (torch.float32, torch.bfloat16):
        return False
    return all(next_power(size) == size > 1 for size in (min(codec.group, d) for d in dims))


def coded_constants(shape: LayerShape, codec: Codec) -> dict[str, int]:
    """Return constants of `attend_coded`. Codes become float32 in registers, so blocks larger than for float32 would spill."""
    return sizes(shape, torch.float32) | {
        "BITS": codec.bits, "KEY_CHANNELS": min(codec.group, shape.key_dim), "VALUE_CHANNELS": min(codec.group, shape.value_dim),
        "SINKS": codec.sinks, "RECENT": codec.recent,
    }  # fmt: skip


class CodedAttentionKernels(AttentionKernels):
    """`attend_coded` and `join` for the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> None:
        super().__init__(slots, mode, limit, longest)
        assert slots.codec is not None
        self._codec, self._sizes = slots.codec, coded_constants(slots.shape, slots.codec)

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
