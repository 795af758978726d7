"""CPU kernel that walks a block (`walk.c`), with the interface that the walk calls.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens, n tokens held, S slots, L candidates: the
tokens held and those of the block, D key dim, E value dim, P = D / 2 pairs, K numbers of the statistics.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.harness.engine.rotary import LONGEST_STREAM, rotate
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Slots
from kvbench.harness.kernels.compiler import Built, built_of, built_of_programs, why_no_programs, why_untraced
from kvbench.harness.kernels.policy_program import Layout, Programs, programs
from kvbench.harness.kernels.states import (
    FirstValues,
    first_values,
    heads_of,
    numbers_of,
    prompts_of,
    put_sums,
    sums_of,
    why_unserved,
)
from kvbench.policies import HeadSizes, PositionMode
from kvbench.policies.merges import Merging
from kvbench.policies.view import mixed_seed

_MAX_TABLE_ANGLES = 2**18
_MAX_PADDED_BYTES = 2**26  # of K and V of a layer whose heads compete


class _Candidates(NamedTuple):
    """Tokens held, oldest first, followed by the tokens of the block."""

    keys: Tensor  # [N, L, D]
    values: Tensor  # [N, L, E]
    position: Tensor  # [N, L] int64
    numbers: list[Tensor]  # statistics of the tokens held, by number. [N, n] each

    @classmethod
    def gather(cls, rows: Rows, keys: Tensor, values: Tensor, counts: Tensor, tokens_before: int, ordered: bool) -> Self:
        """Gather the tokens that some rows hold, padded to the fullest row, and a block.

        Args:
            counts: number of tokens of each row. [N] int64.
            ordered: the slots hold their tokens oldest first.
        """
        count = int(counts.max())
        order = None if ordered else rows.rank.argsort(-1)[:, :count]
        steps = torch.arange(tokens_before, tokens_before + keys.shape[2]).expand(len(rows.rank), -1)
        position = _oldest(rows.position, order, count)
        position = position.where(torch.arange(count) < counts[:, None], tokens_before - 1)  # padding keeps the order
        held = (_oldest(rows.keys, order, count), _oldest(rows.values, order, count), position)
        block = (keys.flatten(0, 1), values.flatten(0, 1), steps)
        keys, values, position = (torch.cat(pair, 1) for pair in zip(held, block, strict=True))
        return cls(keys, values, position, [_oldest(x, order, count) for x in numbers_of(rows)])

    def rotated(self, rows: Rows) -> Tensor:
        """Return the keys, rotated to their positions in the stream. [N, L, D]."""
        keys, position = (x.unflatten(0, (-1, rows.heads)) for x in (self.keys, self.position))
        return rows.view.rotate(keys, position).flatten(0, 1)

    def terms(self, rows: Rows) -> Tensor:
        """Return what each token adds to the statistics that are sums. [N, L, n]."""
        found = rows.written(self.keys, self.values, self.position, torch.zeros_like(self.position))
        return torch.cat([found[s].flatten(2) for s in rows.summed], 2)

    def survive(self, rows: Rows, position: Tensor, counts: Tensor, keys: Tensor | None, values: Tensor | None) -> None:
        """Store the tokens at these positions in the rows.

        Args:
            position: of the tokens of each row, padded to the fullest row. [N, n] int64.
            counts: number of tokens of each row. [N] int64.
            keys: of these tokens, if they were merged. [N, n, D].
            values: likewise. [N, n, E].
        """
        index = torch.searchsorted(self.position, position)[..., None]
        keys, values = (x.take_along_dim(index, 1) if y is None else y for x, y in ((self.keys, keys), (self.values, values)))
        rows.put(keys, values, position, counts)


class _Stores(NamedTuple):
    """Tensors that the kernel changes: cached tokens, oldest first. Slots are the last axis of each tensor."""

    keys: Tensor  # [N, 2, P, S]
    values: Tensor  # [N, E, S]
    position: Tensor  # [N, S] int64
    state: Tensor  # [N, K, S]
    counts: Tensor  # tokens of each row. [N] int64

    @classmethod
    def fill(cls, keys: Tensor, candidates: _Candidates, counts: Tensor, slots: int) -> Self:
        """Allocate room for `slots` tokens, and fill in the tokens held. keys: the candidates', paired. [N, L, P, 2]."""
        count = int(counts.max())
        size, pairs, dims = len(keys), keys.shape[2], candidates.values.shape[2]
        key_store, value_store = torch.empty(size, 2, pairs, slots), torch.zeros(size, dims, slots)  # programs read all values
        key_store[..., :count] = keys[:, :count].permute(0, 3, 2, 1)
        value_store[..., :count] = candidates.values[:, :count].mT
        position = torch.zeros(size, slots, dtype=torch.int64)
        position[:, :count] = candidates.position[:, :count]
        state = torch.zeros(size, len(candidates.numbers), slots)
        for i, number in enumerate(candidates.numbers):
            state[:, i, :count] = number
        return cls(key_store, value_store, position, state, counts)


class CpuWalkKernel:
    """Compiled walk of one policy over the layers of one `Slots`."""

    leaves_ordered = True  # afterwards, the slots hold their tokens oldest first
    rotates = False  # queries are rotated and scaled before the call, with paired dims adjacent
    in_graphs = False

    def __init__(self, slots: Slots, mode: PositionMode, limit: int, kernel: Any, programs: Programs | None) -> None:
        self._kernel, self._rotation, self._programs = kernel, slots.shape.rotation, programs
        self._rotated_by, self._angles = 0, 0
        self._rotates_first = self._rotation is not None and (slots.keys_rotated or mode == "stream")
        table = torch.ones(0, slots.shape.key_dim // 2, dtype=torch.complex64)
        if self._rotation is not None and not self._rotates_first:
            self._rotated_by, self._angles = (1, slots.num_slots) if mode == "cache" else (2, limit + 1)
            table = self._rotation.factors(torch.arange(self._angles), torch.float32, self._angles + 1)
        self._floor = -1 if slots.budget.floor is None else slots.budget.floor
        self._cosine, self._sine = table.real.T.contiguous(), table.imag.T.contiguous()  # by angle. [P, angles] each

    @classmethod
    def from_slots(
        cls, slots: Slots, mode: PositionMode, limit: int, longest: int | None, in_graphs: bool = False
    ) -> Self | None:  # fmt: skip
        """Return the kernel for the layers of some slots; None if there is none. Its loop over tokens needs no graphs."""
        kernel = cls.built(slots, mode, limit).function
        if kernel is None:
            return None
        kernel.restype = ctypes.c_int64
        kernel.argtypes = [*[ctypes.c_void_p] * 18, *[ctypes.c_int64] * 20]
        return cls(slots, mode, limit, kernel, _programs(slots))

    @staticmethod
    def built(slots: Slots, mode: PositionMode, limit: int) -> Built:
        """Build the C function. Unsupported layers, and policies that can't be traced, get neither function nor reason."""
        fits = slots.codec is None and slots.capacity is not None and slots.shape.plain_softmax and slots.shape.key_dim % 2 == 0
        fits = fits and not why_not_walked(slots)
        fits = fits and (mode != "clamped" or slots.shape.rotation is None or limit < _MAX_TABLE_ANGLES)
        if not fits:
            return Built()
        of_policy = _programs(slots)
        return built_of(slots.policy, "walk.c", "walk") if of_policy is None else built_of_programs(of_policy, "walk.c", "walk")

    def __call__(
        self, slots: Slots, rows: Rows, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float,
        ordered: bool, tokens_before: int, written: FirstValues | None = None, unrotated: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Walk a block of streams of equal length. Arguments and result are those of `kernel_interface.WalkKernel`.

        Raises:
            MemoryError: there is no scratch memory.
        """
        streams, heads, group, tokens, _ = query.shape
        size, dims, pairs = streams * heads, values.shape[-1], query.shape[-1] // 2
        counts = rows.count()
        count = int(counts.max())
        if self._rotation is not None and slots.keys_rotated:
            steps = torch.arange(tokens_before, tokens_before + tokens)
            keys = rotate(keys, self._rotation.factors(steps, keys.dtype, LONGEST_STREAM))
        candidates = _Candidates.gather(rows, keys, values, counts, tokens_before, ordered)
        attended = candidates.rotated(rows) if self._rotates_first and not slots.keys_rotated else candidates.keys
        by_pair, sums = attended.float().unflatten(-1, (-1, 2)), sums_of(rows)  # [N, L, P, 2], [N, M]
        kept = self._kept(rows, candidates, count, slots.num_slots)
        stores = _Stores.fill(by_pair, candidates, counts, slots.num_slots)
        first, out = first_values(rows, written, tokens), torch.empty(tokens, size, group, dims)
        queries = torch.empty(0) if unrotated is None else unrotated.flatten(0, 1).permute(2, 0, 1, 3).float().contiguous()
        arrays = (
            query.reshape(size, group, tokens, pairs, 2).permute(0, 2, 4, 3, 1).float().contiguous(),
            by_pair[:, count:].permute(0, 1, 3, 2).contiguous(), values.reshape(size, tokens, dims).float().contiguous(),
            *stores, first, heads_of(rows), prompts_of(rows), self._cosine, self._sine, out, queries, sums,
        )  # fmt: skip
        addresses = ((ctypes.c_void_p * 3)(*(x.data_ptr() for x in tensors)) for tensors in kept)
        failed = self._kernel(
            *(x.data_ptr() for x in arrays), *addresses, first.stride(0), first.stride(1), size, group, tokens, pairs,
            slots.num_slots, dims, tokens_before, slots.most or 0, slots.every, self._floor, slots.shape.sliding_window or 0,
            layer, slots.num_layers, heads, mixed_seed(slots.seed), self._rotated_by, self._angles, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no scratch memory for the compiled walk")
        left = int(counts.max())
        merged_keys = kept[0][0][:, :left] if self._programs is not None and self._programs.merges_keys else None
        merged_values = stores.values[..., :left].mT if isinstance(slots.policy, Merging) else None
        candidates.survive(rows, stores.position[:, :left].contiguous(), counts, merged_keys, merged_values)
        for i, number in enumerate(numbers_of(rows)):
            number[:, :left] = stores.state[:, i, :left]
        put_sums(rows, sums)
        return out.to(values.dtype).view(tokens, streams, heads, group, dims).permute(1, 2, 3, 0, 4)

    def _kept(self, rows: Rows, candidates: _Candidates, count: int, slots: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return what programs keep with every token: of the tokens held, with room for all slots, and of the block's tokens.

        Keys, rotated keys, and terms of sums: [N, S, n] and [N, T, n] float32 each; empty where it is not read.
        """
        keys = candidates.keys
        every = [keys.new_empty(*keys.shape[:2], 0)] * 3
        if self._programs is not None:
            of_keys, of_rotated, of_terms = self._programs.widths
            every = [
                keys if of_keys else every[0],
                candidates.rotated(rows) if of_rotated else every[1],
                candidates.terms(rows) if of_terms else every[2],
            ]
        held = [torch.zeros(len(x), slots, x.shape[2]) for x in every]
        for store, x in zip(held, every, strict=True):
            store[:, :count] = x[:, :count]
        return held, [x[:, count:].float().contiguous() for x in every]


def why_not_walked(slots: Slots) -> str:
    """Return the reason that no walk can be compiled for the policy of some slots; empty if one can be."""
    if because := why_unserved(slots, competing=True):
        return because
    if slots.dtype.itemsize > 4:
        return f"no kernel in {slots.dtype}".replace("torch.", "")
    if slots.uneven and (padded := _padded_bytes(slots)) > _MAX_PADDED_BYTES:
        return f"heads that compete would be padded to {padded >> 20} MiB a layer"
    return why_no_programs(slots.policy, _layout(slots)) if _needs_programs(slots) else ""


def _padded_bytes(slots: Slots) -> int:
    """Return the bytes of K and V of a layer if every head had room for the most tokens that one head may hold."""
    return slots.rows * slots.num_slots * (slots.shape.key_dim + slots.shape.value_dim) * 4


def _needs_programs(slots: Slots) -> bool:
    """Return whether a walk needs programs, because the policy has no expressions for one slot, or heads compete."""
    return slots.uneven or bool(why_untraced(slots.policy))


def _programs(slots: Slots) -> Programs | None:
    """Return the programs of a walk; None if it needs none."""
    return programs(slots.policy, _layout(slots)) if _needs_programs(slots) else None


def _layout(slots: Slots) -> Layout:
    """Return the sizes of a program for all slots of a head, or of all heads of a layer."""
    shape, together = slots.shape, slots.uneven or slots.policy.scope == "layer"
    frequencies = () if shape.rotation is None else tuple(shape.rotation.frequencies.tolist())
    return Layout(
        shape.heads if together else 1, slots.num_slots, HeadSizes(shape.group, shape.key_dim, shape.value_dim),
        slots.num_layers, slots.seed, frequencies, slots.every, shape.sliding_window, slots.uneven, slots.dtype,
    )  # fmt: skip


def _oldest(x: Tensor, order: Tensor | None, count: int) -> Tensor:
    """Return the entries of the `count` oldest tokens, oldest first. x: [N, S, ...]; order: their slots; None if ordered."""
    return x[:, :count] if order is None else x.take_along_dim(order.view(*order.shape, *[1] * (x.dim() - 2)), 1)
