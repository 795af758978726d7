"""The CPU kernels, `step.c`, `release.c` and `walk.c`, with the interface that the walk calls.

Axis letters: B streams, H KV heads, N = B * H, R rows of all layers, G query heads of a KV head, T tokens, n tokens held,
S slots attended, L keys, D key dim, E value dim, P = D / 2 pairs.
"""

from __future__ import annotations

import ctypes
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.harness.engine.kernels.compiler import Built, built, built_of, why_untraced
from kvbench.harness.engine.kernels.states import Written, first_values, heads_of, numbers_of, prompts_of
from kvbench.harness.engine.kernels.tracing import traced
from kvbench.harness.engine.rotary import LONGEST_STREAM, rotate
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode
from kvbench.policies.view import mixed_seed

_MODES: dict[PositionMode, int] = {"cache": 0, "stream": 1, "clamped": 2}
_MAX_SINGLE_THREAD_PRODUCTS = 2**17  # of a layer's scores; below this one thread is faster than several
_MAX_TABLE_ANGLES = 2**18


class StepKernel:
    """The decode step of the layers of one `Slots`."""

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, longest: int | None, kernel: Any) -> None:
        self._kernel, self._mode, self._limit, self._longest = kernel, _MODES[mode], limit, longest
        self._order = torch.arange(slots.shape.key_dim) if slots.shape.rotation is None else slots.shape.rotation.order

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """The kernel for some layers; None if there is none.

        Args:
            slots: of the layers.
            mode: where RoPE puts a cached token.
            limit: largest distance in mode `clamped`, in tokens.
            longest: bound of the angles; the number of slots when None.
        """
        kernel = cls.built(slots).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 13, *[ctypes.c_int64] * 8, ctypes.c_float]
        return cls(slots, mode, limit, longest, kernel)

    @staticmethod
    def built(slots: Slots) -> Built:
        """The C function. Layers that it does not support (not float32, not a plain softmax) get neither it nor a reason."""
        shape = slots.shape
        if not shape.plain or slots.tensors.keys.dtype != torch.float32:
            return Built()
        sizes = (("GROUP", str(shape.group)), ("KEY_DIM", str(shape.key_dim)), ("VALUE_DIM", str(shape.value_dim)))
        return built("step.c", "step", sizes)

    def __call__(
        self, slots: Slots, rows: Rows, query: Tensor, key: Tensor, value: Tensor, scaling: float, mass: Tensor | None
    ) -> Tensor:
        """Read a token of each stream in one layer. Its rank and position are already in its slot.

        Args:
            slots: of the layer.
            rows: of the layer.
            query: unrotated, in the model's order of dims. [B, H * G, 1, D].
            key: unrotated, in the model's order of dims. [B, H, 1, D].
            value: [B, H, 1, E].
            scaling: of the scores.
            mass: written: the softmax weights; None if they are not needed. [N, G, S].

        Returns:
            [B, H * G, 1, E].

        Raises:
            MemoryError: there is no scratch memory.
        """
        size, attended = rows.rank.shape
        low = high = None
        level = 1
        if slots.shape.rotation is not None:
            low, high, level = slots.shape.rotation.tables(torch.float32, self._longest or slots.num_slots + 1)
        out = torch.empty(*query.shape[:3], value.shape[-1])
        arrays = (
            query.contiguous(), key.contiguous(), value.contiguous(), self._order, rows.keys, rows.values, rows.rank,
            rows.position, rows.free, low, high, out, mass,
        )  # fmt: skip
        threads = torch.get_num_threads() if query.numel() * attended > _MAX_SINGLE_THREAD_PRODUCTS else 1
        failed = self._kernel(
            *(None if x is None else x.data_ptr() for x in arrays), size, rows.base, slots.num_slots, attended, self._mode,
            self._limit, level, min(threads, size), scaling,
        )  # fmt: skip
        if failed:
            raise MemoryError("no scratch memory for a decode step")
        return out


class ReleaseKernel:
    """The bookkeeping after a token, for all layers of one `Slots` at once."""

    def __init__(self, kernel: Any, reads: frozenset[str]) -> None:
        self._kernel, self._reads = kernel, reads

    @classmethod
    def from_slots(cls, slots: Slots) -> Self | None:
        """The kernel for some layers; None if there is none."""
        kernel = cls.built(slots).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 9, *[ctypes.c_int64] * 11]
        return cls(kernel, traced(slots.policy).reads)

    @staticmethod
    def built(slots: Slots) -> Built:
        """The C function. Without float32 statistics and a traceable policy there is neither it nor a reason."""
        if slots.capacity is None or slots.wide != torch.float32 or why_untraced(slots.policy) or why_not_every(slots):
            return Built()
        return built_of(slots.policy, "release.c", "release")

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Update the statistics and choose the next token's slot.

        Args:
            slots: of the layers. First values of the token's statistics are already in its slot.
            rows: of all layers.
            mass: softmax weights, if a statistic sees them. [R, G, S].
            step: of the token. [R] int64.
            full: every stream holds `capacity + every` tokens and evicts `every` of them; if False, none does.

        Raises:
            MemoryError: there is no scratch memory.
        """
        tensors = slots.tensors
        numbers = [x.data_ptr() + i * x.itemsize for x in tensors.states.values() for i in range(x.stride(1))]
        states = (ctypes.c_void_p * len(numbers))(*numbers)
        head = heads_of(rows) if "head" in self._reads else None
        prompt = prompts_of(rows) if "prompt" in self._reads else None
        arrays = (tensors.rank, tensors.position, slots.layer_index, head, prompt, step, tensors.free)
        failed = self._kernel(
            None if mass is None else mass.data_ptr(), states, *(None if x is None else x.data_ptr() for x in arrays),
            len(tensors.rank), slots.streams * slots.shape.heads, slots.shape.heads, slots.shape.group, slots.num_slots,
            rows.rank.shape[1], slots.every if full else 0, slots.every, slots.shape.sliding_window or 0, slots.num_layers,
            mixed_seed(slots.seed),
        )  # fmt: skip
        if failed:
            raise MemoryError("no scratch memory for the bookkeeping of a decode step")


class WalkKernel:
    """The compiled walk of one policy over the layers of one `Slots`."""

    leaves_ordered = True  # afterwards, the slots hold their tokens oldest first
    rotates = False  # queries are rotated and scaled before, and paired dims lie side by side

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, kernel: Any) -> None:
        self._kernel, self._rotation = kernel, slots.shape.rotation
        self._in_stream = mode == "stream" and self._rotation is not None  # keys are rotated only once
        self._rotated_by, self._angles = 0, 0
        table = torch.ones(0, slots.shape.key_dim // 2, dtype=torch.complex64)
        if self._rotation is not None and not self._in_stream:
            self._rotated_by, self._angles = (1, slots.num_slots) if mode == "cache" else (2, limit + 1)
            table = self._rotation.factors(torch.arange(self._angles), torch.float32, self._angles + 1)
        self._cosine, self._sine = table.real.T.contiguous(), table.imag.T.contiguous()  # of every angle. [P, angles]

    @classmethod
    def from_slots(cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Self | None:
        """The kernel for some layers; None if there is none."""
        kernel = cls.built(slots, mode, limit).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 13, *[ctypes.c_int64] * 19]
        return cls(slots, mode, limit, kernel)

    @staticmethod
    def built(slots: Slots, mode: PositionMode, limit: int) -> Built:
        """The C function. Layers that it does not support and policies that can't be traced get neither it nor a reason."""
        fits = slots.capacity is not None and slots.shape.plain and slots.shape.key_dim % 2 == 0
        fits = fits and slots.tensors.keys.dtype.itemsize <= 4 and not why_untraced(slots.policy)
        fits = fits and (mode != "clamped" or slots.shape.rotation is None or limit < _MAX_TABLE_ANGLES)
        fits = fits and not why_not_every(slots)
        return built_of(slots.policy, "walk.c", "walk") if fits else Built()

    def __call__(
        self, slots: Slots, rows: Rows, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float,
        ordered: bool, seen: int, written: Written | None = None,
    ) -> Tensor:  # fmt: skip
        """Walk a block of streams of equal length.

        Args:
            slots: of the layer.
            rows: of the layer.
            layer: its index in the model.
            query: rotated and scaled, paired dims side by side; or if the kernel `rotates`,
                as the model made it. [B, H, G, T, D].
            keys: unrotated, in the same order of dims. [B, H, T, D].
            values: [B, H, T, Dv].
            scaling: of the scores, if the kernel `rotates`.
            ordered: the slots hold their tokens oldest first.
            seen: tokens before the block.
            written: the first values of statistics that compute them. [B, H, T, *k] each.

        Returns:
            [B, H, G, T, Dv], dtype of the values.

        Raises:
            MemoryError: there is no scratch memory.
        """
        streams, heads, group, tokens, _ = query.shape
        places, size, pairs, dims = slots.num_slots, streams * heads, query.shape[-1] // 2, values.shape[-1]
        count, kept = held_after(slots, seen), held_after(slots, seen + tokens)
        order = None if ordered else rows.rank.argsort(-1)[:, :count]
        held_keys, held_values, held_position = (_oldest(x, order, count) for x in (rows.keys, rows.values, rows.position))
        steps = torch.arange(seen, seen + tokens).expand(size, -1)
        all_keys, all_positions = torch.cat([held_keys, keys.flatten(0, 1)], 1), torch.cat([held_position, steps], 1)
        by_pair = self._by_pair(all_keys, all_positions)
        key_store, value_store = torch.empty(size, 2, pairs, places), torch.empty(size, dims, places)
        key_store[..., :count] = by_pair[:, :count].permute(0, 3, 2, 1)
        value_store[..., :count] = held_values.mT
        position, numbers = torch.zeros(size, places, dtype=torch.int64), numbers_of(rows)
        position[:, :count] = held_position
        state, first = torch.zeros(size, len(numbers), places), first_values(rows, written, tokens)
        for i, number in enumerate(numbers):
            state[:, i, :count] = _oldest(number, order, count)
        out = torch.empty(tokens, size, group, dims)
        arrays = [
            query.reshape(size, group, tokens, pairs, 2).permute(0, 2, 4, 3, 1).float().contiguous(),
            by_pair[:, count:].permute(0, 1, 3, 2).contiguous(), values.reshape(size, tokens, dims).float().contiguous(),
            key_store, value_store, position, state, first, heads_of(rows), prompts_of(rows), self._cosine, self._sine, out,
        ]  # fmt: skip
        failed = self._kernel(
            *(x.data_ptr() for x in arrays), first.stride(0), first.stride(1), size, group, tokens, pairs, places, dims, count,
            seen, (slots.capacity or 0) + slots.every, slots.every, slots.shape.sliding_window or 0, layer, slots.num_layers,
            heads, mixed_seed(slots.seed), self._rotated_by, self._angles, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no scratch memory for the compiled walk")
        all_values, position = torch.cat([held_values, values.flatten(0, 1)], 1), position[:, :kept].contiguous()
        _put_survivors(rows, all_keys, all_values, all_positions, position)
        for i, number in enumerate(numbers):
            number[:, :kept] = state[:, i, :kept]
        return out.to(values.dtype).view(tokens, streams, heads, group, dims).permute(1, 2, 3, 0, 4)

    def _by_pair(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys in the kernel's layout, rotated in mode `stream`. [N, L, D] -> [N, L, P, 2] float32."""
        keys = keys.float()
        if self._in_stream and self._rotation is not None:
            keys = rotate(keys, self._rotation.factors(positions, torch.float32, LONGEST_STREAM))
        return keys.unflatten(-1, (-1, 2))


def held_after(slots: Slots, seen: int) -> int:
    """Tokens held after `seen` tokens of a stream: evictions bring them back to the capacity."""
    capacity = slots.capacity or 0
    return seen if seen < capacity + slots.every else capacity + (seen - capacity) % slots.every


def _oldest(x: Tensor, order: Tensor | None, count: int) -> Tensor:
    """The `count` oldest tokens' values, oldest first. order: of their slots; None if they are ordered. [N, S, ...]."""
    return x[:, :count] if order is None else x.take_along_dim(order.view(*order.shape, *[1] * (x.dim() - 2)), 1)


def _put_survivors(rows: Rows, keys: Tensor, values: Tensor, candidates: Tensor, position: Tensor) -> None:
    """Hold the tokens at some positions, among candidates. [N, L, D], [N, L, E], [N, L] int64, [N, n] int64."""
    at = torch.searchsorted(candidates, position)[..., None]
    rows.put(keys.take_along_dim(at, 1), values.take_along_dim(at, 1), position)


def why_not_every(slots: Slots) -> str:
    """Why layers whose tokens are evicted several at once have no kernel; empty if they have one, or evict one at a time."""
    outlives = slots.every > 1 and slots.shape.sliding_window is not None  # a token would be held when no query may see it
    return f"no kernel evicts {slots.every} tokens at once from a layer with a sliding window" if outlives else ""


def lost(slots: Slots, mode: PositionMode, limit: int) -> str:
    """Why a kernel that supports these layers and their policy could not be built; empty if all were."""
    kernels = (StepKernel.built(slots), ReleaseKernel.built(slots), WalkKernel.built(slots, mode, limit))
    return next((kernel.why_not for kernel in kernels if kernel.why_not), "")
