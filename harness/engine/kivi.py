"""Stores of KIVI: keys coded per channel over groups of tokens, values coded per token, and the newest K and V as floats.

Tokens are counted by rank. Nothing is evicted, so a token's rank equals its slot and never changes. A step reads the keys of its
own block of `residual` tokens as floats. It also reads the values of its own token and of `residual` older tokens as floats.

Axis letters: R rows of all layers, N rows of a window, S slots, D head dim, W residual, b blocks of W keys, g groups in a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.harness.core.codec import Kivi
from kvbench.harness.engine.slot_stores import CodedStore, CodedWindow, Window, decoded, encoded, extended, with_run


class KiviKeys:
    """Store of keys that are coded in blocks of tokens.

    Attributes:
        codec: codec of the keys.
        codes: [R, b, D, W * bits / 8] uint8.
        scale: [R, b, D, g], the model's dtype.
        zero: value that code 0 stands for. [R, b, D, g], the model's dtype.
        exact: newest keys, each at its slot modulo W. [R, W, D].
    """

    def __init__(self, codec: Kivi, codes: Tensor, scale: Tensor, zero: Tensor, exact: Tensor) -> None:
        self.codec, self.codes, self.scale, self.zero, self.exact = codec, codes, scale, zero, exact
        self.nbytes = sum(x.nbytes for x in (codes, scale, zero, exact))

    @classmethod
    def empty(cls, codec: Kivi, like: Tensor) -> KiviKeys:
        """Create an empty store of keys. like: tensor of its rows, slots and dtype. [R, S, D].

        Raises:
            ValueError: groups don't fill whole bytes.
        """
        (rows, slots, dims), residual = like.shape, codec.residual
        codec.refuse_unfit(dims)
        blocks = rows, slots // residual, dims
        codes = like.new_zeros(*blocks, residual * codec.bits // 8, dtype=torch.uint8)
        scale, zero = (like.new_zeros(*blocks, residual // codec.group) for _ in range(2))
        return cls(codec, codes, scale, zero, like.new_zeros(rows, residual, dims))

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> KiviKeysWindow:
        """Return a window on the first `slots` slots of some rows."""
        return KiviKeysWindow(self, rows, slots, rank[rows])

    def extended(self, slots: int) -> KiviKeys:
        """Return a copy with `slots` slots, the new ones empty."""
        codes, scale, zero = (extended(x, slots // self.codec.residual, 0) for x in (self.codes, self.scale, self.zero))
        return KiviKeys(self.codec, codes, scale, zero, self.exact)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> KiviKeys:
        """Return a copy with `change` applied to every tensor."""
        return KiviKeys(self.codec, *(change(x) for x in (self.codes, self.scale, self.zero, self.exact)))

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Return the bytes of the keys held. Keys of an incomplete block are floats."""
        count, (dims, itemsize) = held.sum(-1), (self.exact.shape[-1], self.exact.itemsize)
        blocks = int((count // self.codec.residual).sum()) * self.codec.block_bytes(dims, itemsize)
        return blocks + int((count % self.codec.residual).sum()) * dims * itemsize


class KiviKeysWindow(Window):
    """Window on some rows of keys."""

    def __init__(self, store: KiviKeys, rows: slice, slots: int, rank: Tensor) -> None:
        """Open a window. rank: ranks in all slots of these rows. [N, *] int64."""
        self._codec, self._slots, self._rank = store.codec, slots, rank
        self._parts = store.codes[rows], store.scale[rows], store.zero[rows]
        self._exact, self._row = store.exact[rows], torch.arange(len(rank), device=rank.device)
        self.parts = *self._parts, self._exact

    def read(self) -> Tensor:
        """Return the decoded keys of complete blocks, and the exact keys of the newest token's block. [N, S, D]."""
        slot, size = torch.arange(self._slots, device=self._rank.device), self._codec.residual
        newest = (count_of(self._rank) - 1)[:, None]
        ours = (slot // size == newest // size)[..., None]
        return torch.where(ours, self._exact[:, slot % size], self._decoded())

    def _decoded(self) -> Tensor:
        """Decode the keys of all blocks; slots after the last whole block are zero. [N, S, D], the model's dtype."""
        keys = decoded(*self._parts, self._codec.bits).mT.flatten(1, 2)
        missing = self._slots - keys.shape[1]
        return torch.nn.functional.pad(keys, (0, 0, 0, missing))

    def write(self, indices: Tensor, x: Tensor) -> None:
        """Write keys to consecutive slots of each row, and code every block that becomes complete."""
        new = x.unflatten(0, (len(self._row), -1))
        first = indices.view(len(self._row), -1)[:, 0] % self._rank.shape[1]
        self._append(first, new, first.new_full(first.shape, new.shape[1]))

    def put(self, x: Tensor) -> None:
        """Fill the first slots of each row, up to the number of tokens that the row holds."""
        if x.shape[1]:
            count = count_of(self._rank)
            self._append(torch.zeros_like(count), x, count)

    def _append(self, first: Tensor, new: Tensor, count: Tensor) -> None:
        """Append keys, oldest first.

        Args:
            first: slot of each row's first new key. [N] int64.
            new: [N, T, D].
            count: number of new keys of each row. [N] int64.
        """
        size, blocks = self._codec.residual, self._parts[0].shape[1]
        before, of_block = (first % size)[:, None], torch.arange(size, device=new.device)
        known = torch.cat([self._exact, new], 1)
        for number in range((size - 1 + new.shape[1]) // size if blocks else 0):
            token = number * size + of_block  # counted from the start of the block that the first key is in
            source = torch.where(token < before, token, size + token - before).clamp(max=known.shape[1] - 1)
            block = known.take_along_dim(source[..., None], 1)
            complete = ((number + 1) * size <= before[:, 0] + count).view(-1, 1, 1)
            place = self._row, (first // size + number).clamp(max=blocks - 1)
            for part, coded in zip(self._parts, encoded(block.mT, self._codec), strict=True):
                part[place] = torch.where(complete, coded, part[place])
        last = (first + count - 1)[:, None]
        source = last - (last - of_block) % size - first[:, None]  # index in `new` of the newest key for each place
        kept = new.take_along_dim(source.clamp(0, new.shape[1] - 1)[..., None], 1)
        self._exact.copy_(torch.where((source >= 0)[..., None], kept, self._exact))

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return all slots in each stage: coded, coded, exempt."""
        self.write(indices, x)
        return torch.cat([self._decoded(), self._decoded(), with_run(before, indices % self._rank.shape[1], x)], 1)


class KiviValues(CodedStore):
    """Store of values that are coded token by token."""

    @classmethod
    def of_kivi(cls, codec: Kivi, like: Tensor) -> KiviValues:
        """Create an empty store of values. like: tensor of its rows, slots and dtype. [R, S, D].

        Raises:
            ValueError: heads of this size can't be coded.
        """
        return cls.empty(codec.of_values, like)

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> KiviValuesWindow:
        """Return a window on the first `slots` slots of some rows."""
        return KiviValuesWindow(self, rows, slots, rank[rows])

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Return the bytes of the values held. The newest `recent - 1` values are floats."""
        count, (dims, itemsize) = held.sum(-1), (self.exact.shape[-1], self.exact.itemsize)
        exempt = int(count.clamp(max=self.codec.recent - 1).sum())
        return exempt * dims * itemsize + (int(count.sum()) - exempt) * self.codec.bytes_of(dims, itemsize)


class KiviValuesWindow(CodedWindow):
    """Window on some rows of values."""

    def _order(self) -> Tensor:
        rank = self._account
        return torch.where(rank < rank.shape[1], rank, -1)

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return all slots in each stage: coded, exempt, exempt."""
        both = super().entered(indices, x, before)
        return torch.cat([both, both[:, self._slots :]], 1)


def count_of(rank: Tensor) -> Tensor:
    """Return the number of tokens that each row holds. rank: ranks in all slots, [N, S] int64 -> [N] int64."""
    return (rank < rank.shape[1]).sum(-1)
