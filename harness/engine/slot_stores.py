"""Stores of K or V for slots. All reads and writes go through a window on a store.

Axis letters: R rows of all layers, N rows of a window, S slots, E exempt tokens, D head dim, g groups of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.engine.rotary import rotate
from kvbench.policies import CacheView, Statistic
from kvbench.policies.view import Rotate


class Window(Protocol):
    """Window on the first slots of some rows of a store.

    Attributes:
        parts: tensors of these rows, which depend on the class of the store.
    """

    parts: tuple[Tensor, ...]

    def read(self) -> Tensor:
        """Return the slots' contents, decoded. [N, S, D], the model's dtype."""

    def write(self, indices: Tensor, x: Tensor) -> None:
        """Write vectors to slots, equally many per row. Their positions must be entered before.

        Args:
            indices: flat indices in the store, row by row. [n] int64.
            x: [n, D].
        """

    def put(self, x: Tensor) -> None:
        """Fill the first slots of each row. [N, n, D]."""

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return the contents that the run's tokens may see.

        Args:
            before: slots' contents before the run's positions were entered. [N, S, D].

        Returns:
            [N, S, D]. For a coded store [N, n * S, D]: the contents of all slots in each of the n stages of `stages`.
        """

    def dots(self, query: Tensor, factors: Tensor | None) -> Tensor:
        """Return the dot products of each row's queries with its keys, for a store of keys.

        Args:
            query: rotated and scaled. [N, G, D].
            factors: RoPE that the keys still need; None if they need none. [N, S, P].

        Returns:
            [N, G, S].
        """
        keys = self.read()
        return torch.bmm(query, (keys if factors is None else rotate(keys, factors)).transpose(1, 2))

    def mix(self, weights: Tensor, into: Tensor) -> None:
        """Write weighted sums of each row's values, for a store of values. weights: [N, G, S]; into: [N, G, D]."""
        values = self.read()
        torch.bmm(weights.to(values.dtype), values, out=into)


class Store(Protocol):
    """K or V of all rows."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> Window:
        """Return a window on the first `slots` slots of some rows. position, rank: as in `SlotTensors`. [R, S] int64."""

    def extended(self, slots: int) -> Self:
        """Return a copy with `slots` slots, the new ones empty."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change`, which may select or repeat rows, applied to every tensor."""

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Return the bytes of the tokens held. Syncs with the host. held: [R, S] bool; position: [R, S] int64."""


class FloatStore:
    """Store of tokens in the model's dtype.

    Attributes:
        tensor: [R, S, D].
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.flat, self.nbytes = tensor, tensor.flatten(0, 1), tensor.nbytes

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> FloatWindow:
        """Return a window on the first `slots` slots of some rows."""
        return FloatWindow(self.tensor[rows, :slots], self.flat)

    def extended(self, slots: int) -> FloatStore:
        """Return a copy with `slots` slots, the new ones zero."""
        return FloatStore(extended(self.tensor, slots, 0))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> FloatStore:
        """Return a copy with `change` applied to the tensor."""
        return FloatStore(change(self.tensor))

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Return the bytes of the tokens held."""
        return int(held.sum()) * self.tensor.shape[-1] * self.tensor.itemsize


class FloatWindow(Window):
    """Window on some rows of a float store."""

    def __init__(self, view: Tensor, flat: Tensor) -> None:
        self._view, self._flat, self.parts = view, flat, (view,)

    def read(self) -> Tensor:
        """Return the slots themselves, without a copy."""
        return self._view

    def write(self, indices: Tensor, x: Tensor) -> None:
        """Write vectors to slots."""
        self._flat.index_copy_(0, indices, x)

    def put(self, x: Tensor) -> None:
        """Fill the first slots."""
        self._view[:, : x.shape[1]] = x

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return the slots' contents."""
        self.write(indices, x)
        return before


class CodedStore:
    """Store of tokens as packed integers. Exempt tokens are held in the model's dtype, too.

    A token is coded when it is written. It also takes a place among the exempt tokens, until the token that comes `recent` steps
    later takes this place. Position and newest position of the row decide whether a slot's token is exempt.

    Attributes:
        codec: codec of every token that is not exempt.
        codes: [R, S, D * bits / 8] uint8.
        scale: [R, S, g], the model's dtype.
        zero: value that code 0 stands for. [R, S, g], the model's dtype.
        exact: vectors of the exempt tokens. [R, E, D].
    """

    def __init__(self, codec: Codec, codes: Tensor, scale: Tensor, zero: Tensor, exact: Tensor) -> None:
        self.codec, self.codes, self.scale, self.zero, self.exact = codec, codes, scale, zero, exact
        self.nbytes = sum(x.nbytes for x in (codes, scale, zero, exact))

    @classmethod
    def empty(cls, codec: Codec, like: Tensor) -> Self:
        """Create an empty store. like: tensor of its rows, slots and dtype. [R, S, D].

        Raises:
            ValueError: heads of this size can't be coded.
        """
        (rows, slots, dims), groups = like.shape, codec.groups(like.shape[2])
        codec.refuse_unfit(dims)
        codes = like.new_zeros(rows, slots, dims * codec.bits // 8, dtype=torch.uint8)
        scale, zero = (like.new_zeros(rows, slots, groups) for _ in range(2))
        return cls(codec, codes, scale, zero, like.new_zeros(rows, codec.exempt, dims))

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> CodedWindow:
        """Return a window on the first `slots` slots of some rows."""
        return CodedWindow(self, rows, slots, position[rows])

    def extended(self, slots: int) -> Self:
        """Return a copy with `slots` slots, the new ones empty."""
        codes, scale, zero = (extended(x, slots, 0) for x in (self.codes, self.scale, self.zero))
        return type(self)(self.codec, codes, scale, zero, self.exact)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change` applied to every tensor."""
        return type(self)(self.codec, *(change(x) for x in (self.codes, self.scale, self.zero, self.exact)))

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Return the bytes of the tokens held. Exempt tokens are floats."""
        exempt = int((held & is_exempt(self.codec, position, position.amax(-1, keepdim=True))).sum())
        dims, itemsize = self.exact.shape[-1], self.exact.itemsize
        return exempt * dims * itemsize + (int(held.sum()) - exempt) * self.codec.bytes_of(dims, itemsize)


class CodedWindow(Window):
    """Window on some rows of a coded store."""

    def __init__(self, store: CodedStore, rows: slice, slots: int, account: Tensor) -> None:
        """Open a window. account: position, or for KIVI's values rank, in all slots of these rows. [N, *] int64."""
        self._store, self._codec, self._account, self._slots = store, store.codec, account, slots
        self._codes, self._scale, self._zero = (x[rows, :slots] for x in (store.codes, store.scale, store.zero))
        self._exact, self._first = store.exact[rows], rows.start * account.shape[1]
        self.parts = self._codes, self._scale, self._zero, self._exact

    def _order(self) -> Tensor:
        """Return the order of arrival of each slot's token; -1 where there is none. [N, *] int64."""
        return self._account

    def read(self) -> Tensor:
        """Return the slots' contents: decoded, or exact for exempt tokens. [N, S, D]."""
        x, last = self._decoded(), self._codec.exempt - 1
        if last < 0:
            return x
        order = self._order()
        place = self._place(order[:, : self._slots], order)[..., None]
        return torch.where(place <= last, self._exact.take_along_dim(place.clamp(max=last), 1), x)

    def _decoded(self) -> Tensor:
        """Decode all slots as if no token were exempt. [N, S, D]."""
        return decoded(self._codes, self._scale, self._zero, self._codec.bits)

    def write(self, indices: Tensor, x: Tensor) -> None:
        """Write vectors to slots as codes, and to the places of exempt tokens as floats."""
        parts = self._store.codes, self._store.scale, self._store.zero
        for part, new in zip(parts, encoded(x, self._codec), strict=True):
            part.flatten(0, 1).index_copy_(0, indices, new)
        if not self._codec.exempt or not len(indices):
            return
        rows = len(self._exact)
        order = self._order()
        place = self._place(order.flatten()[indices - self._first].view(rows, -1), order)
        source = place.new_full((rows, self._codec.exempt + 1), -1)  # token for each place; the last entry is for all others
        source.scatter_(1, place, torch.arange(place.shape[1], device=indices.device).expand_as(place))
        source = source[:, :-1, None]
        new = x.unflatten(0, (rows, -1)).take_along_dim(source.clamp(min=0), 1)
        self._exact.copy_(torch.where(source >= 0, new, self._exact))

    def put(self, x: Tensor) -> None:
        """Fill the first slots of each row."""
        first = torch.arange(len(x), device=x.device)[:, None] * self._account.shape[1] + self._first
        self.write((first + torch.arange(x.shape[1], device=x.device)).flatten(), x.flatten(0, 1))

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return each slot twice: coded, and exempt."""
        self.write(indices, x)
        return torch.cat([self._decoded(), with_run(before, indices % self._account.shape[1], x)], 1)

    def _place(self, order: Tensor, of_all: Tensor) -> Tensor:
        """Return the tokens' places among the exempt; E for coded tokens. [N, n] int64.

        order: order of the tokens; of_all: order in all slots.
        """
        codec = self._codec
        place = codec.sinks + order % codec.recent if codec.recent else order
        place = torch.where(order < codec.sinks, order, place)
        return torch.where(is_exempt(codec, order, of_all.amax(-1, keepdim=True)), place, codec.exempt)


class StoredView(CacheView):
    """View whose keys and values are read from their windows when a policy accesses them."""

    def __init__(
        self,
        rank: Tensor,
        position: Tensor,
        step: Tensor,
        keys: Window | None,
        values: Window,
        states: dict[Statistic, Tensor],
        layer: Tensor,
        head: Tensor,
        prompt: Tensor,
        num_layers: int,
        seed: int,
        rotate: Rotate,
    ) -> None:
        """Wrap windows. keys: None if keys are stored rotated; the view then has none. Others are those of `CacheView`."""
        self.rank, self.position, self.step, self.states, self.layer = rank, position, step, states, layer
        self.head, self.prompt, self.num_layers, self.seed, self.rotate = head, prompt, num_layers, seed, rotate
        self._windows = {"keys": keys, "values": values}
        if isinstance(values, FloatWindow):  # reads return the slots themselves
            self.values = self._read(values)

    def __getattr__(self, name: str) -> Tensor:
        window = vars(self).get("_windows", {}).get(name)
        if window is None:
            raise AttributeError(name)
        return self._read(window)

    def _read(self, window: Window) -> Tensor:
        return window.read().unflatten(0, (-1, self.rank.shape[1]))


def is_exempt(codec: Codec, position: Tensor, newest: Tensor) -> Tensor:
    """Return which tokens are exempt from coding. position: -1 in empty slots; newest: newest position. Any shape, int64."""
    return ((position < codec.sinks) | (newest - position < codec.recent)) & (position >= 0)


def stages(codec: Codec, position: Tensor, rank: Tensor, steps: Tensor, ranks: Tensor) -> list[Tensor]:
    """Return, per storage stage of `Window.entered`, the (token, slot) pairs that read the slot in that stage.

    Args:
        position: positions in the slots. [R, 1, S] int64.
        rank: ranks in the slots. [R, 1, S] int64.
        steps: steps of the run's tokens. [R, T, 1] int64.
        ranks: ranks of the run's tokens. [R, T, 1] int64.

    Returns:
        Masks of (coded, exempt); for KIVI of (both coded, key coded, both exempt). [R, T, S] bool each; exactly one is true.
    """
    if isinstance(codec, Kivi):
        value, key = ranks - rank <= codec.residual, rank // codec.residual == ranks // codec.residual
        return [~value, value & ~key, key]
    exempt = is_exempt(codec, position, steps)
    return [~exempt, exempt]


def with_run(before: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """Return the slots after a run was written. before: [N, S, D]; slots: the run's, [n] int64, row by row; x: [n, D]."""
    of_rows = x.unflatten(0, (len(before), -1))
    return before.scatter(1, slots.view(*of_rows.shape[:2], 1).expand_as(of_rows), of_rows)


def as_written(x: Tensor, position: Tensor, codec: Codec) -> Tensor:
    """Return tokens as they are read back right after they are stored. x: [..., D]; position: [...] int64 -> [..., D]."""
    exempt = is_exempt(codec, position, position)[..., None]
    return x if codec.codes_later else torch.where(exempt, x, decoded(*encoded(x, codec), codec.bits))


def encoded(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor, Tensor]:
    """Encode vectors as packed integers, scales and zeros. [..., D] -> [..., D * bits / 8] uint8, [..., g], [..., g].

    scale = (largest - smallest) / (2^bits - 1), zero = smallest, code = round((x - zero) / scale).
    """
    grouped = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (codec.groups(x.shape[-1]), -1))
    least, most = grouped.aminmax(dim=-1)
    levels = 2**codec.bits - 1
    scale, zero = ((most - least) / levels).to(x.dtype), least.to(x.dtype)
    step = scale.to(grouped.dtype).clamp(min=torch.finfo(grouped.dtype).tiny)  # equal numbers have a scale of 0
    codes = ((grouped - zero[..., None]) / step[..., None]).round().clamp(0, levels).to(torch.uint8).flatten(-2)
    if codec.bits == 8:
        return codes, scale, zero
    shifts = torch.arange(0, 8, codec.bits, dtype=torch.uint8, device=x.device)
    return (codes.unflatten(-1, (-1, len(shifts))) << shifts).sum(-1, dtype=torch.uint8), scale, zero


def decoded(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Decode vectors: code * scale + zero. Arguments are the results of `encoded`. -> [..., D], dtype of the scale."""
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        codes = ((codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    float_dtype = torch.promote_types(scale.dtype, torch.float32)
    x = codes.to(float_dtype).unflatten(-1, (scale.shape[-1], -1)).mul_(scale[..., None]).add_(zero[..., None])
    return x.flatten(-2).to(scale.dtype)


def extended(x: Tensor, slots: int, fill: float) -> Tensor:
    """Return a copy with more slots, filled with `fill`. [R, S, ...]."""
    longer = x.new_full((x.shape[0], slots, *x.shape[2:]), fill)
    longer[:, : x.shape[1]] = x
    return longer
