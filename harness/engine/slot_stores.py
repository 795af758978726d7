"""Stores: how slots hold K, or V. Whoever reads and writes what they hold goes through a window on a store.

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
    """Some rows of a store, and their first slots.

    Attributes:
        parts: the tensors of these rows, as the store's class has them.
    """

    parts: tuple[Tensor, ...]

    def read(self) -> Tensor:
        """Return the slots' contents, decoded. [N, S, D], the model's dtype."""

    def write(self, indices: Tensor, x: Tensor) -> None:
        """Put vectors into slots, as many in each row; their positions are entered before.

        Args:
            indices: flat indices in the store, row by row. [n] int64.
            x: [n, D].
        """

    def put(self, x: Tensor) -> None:
        """Fill the first slots of each row. [N, n, D]."""

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return all that one of them may see.

        Args:
            before: what was read before their positions were entered. [N, S, D].

        Returns:
            [N, S, D]; of a coded store [N, n * S, D]: what each slot holds in each of the stages of `stages`.
        """

    def dots(self, query: Tensor, factors: Tensor | None) -> Tensor:
        """Dot products of a row's queries with its keys, if these are keys.

        Args:
            query: rotated and scaled. [N, G, D].
            factors: RoPE that the keys still need; None if none. [N, S, P].

        Returns:
            [N, G, S].
        """
        keys = self.read()
        return torch.bmm(query, (keys if factors is None else rotate(keys, factors)).transpose(1, 2))

    def mix(self, weights: Tensor, into: Tensor) -> None:
        """Weighted sums of a row's values, if these are values. weights: [N, G, S]; into: [N, G, D]."""
        values = self.read()
        torch.bmm(weights.to(values.dtype), values, out=into)


class Store(Protocol):
    """K or V of all rows."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> Window:
        """The first `slots` slots of some rows. position, rank: as in `SlotTensors`, of all rows and slots. [R, S] int64."""

    def extended(self, slots: int) -> Self:
        """Return a copy with `slots` slots, the new ones empty."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change`, which may select or repeat rows, applied to every tensor."""

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Bytes that the tokens held take. Syncs with the host. held: [R, S] bool; position: [R, S] int64."""


class FloatStore:
    """Tokens in the model's dtype.

    Attributes:
        tensor: [R, S, D].
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.flat, self.nbytes = tensor, tensor.flatten(0, 1), tensor.nbytes

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> FloatWindow:
        """The first `slots` slots of some rows."""
        return FloatWindow(self.tensor[rows, :slots], self.flat)

    def extended(self, slots: int) -> FloatStore:
        """Return a copy with `slots` slots, the new ones zero."""
        return FloatStore(extended(self.tensor, slots, 0))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> FloatStore:
        """Return a copy with `change` applied to the tensor."""
        return FloatStore(change(self.tensor))

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Bytes that the tokens held take."""
        return int(held.sum()) * self.tensor.shape[-1] * self.tensor.itemsize


class FloatWindow(Window):
    """Some rows of a float store."""

    def __init__(self, view: Tensor, flat: Tensor) -> None:
        self._view, self._flat, self.parts = view, flat, (view,)

    def read(self) -> Tensor:
        """The slots themselves."""
        return self._view

    def write(self, indices: Tensor, x: Tensor) -> None:
        """Put vectors into slots."""
        self._flat.index_copy_(0, indices, x)

    def put(self, x: Tensor) -> None:
        """Fill the first slots."""
        self._view[:, : x.shape[1]] = x

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return the slots."""
        self.write(indices, x)
        return before


class CodedStore:
    """Tokens as packed integers; those that are exempt are held in the model's dtype, too.

    A token is coded when it is written, and also goes to a place for exempt ones, which it loses to the token that comes
    `recent` steps later. What a slot holds follows from its position and the newest one of its row.

    Attributes:
        codec: of every token that isn't exempt.
        codes: [R, S, D * bits / 8] uint8.
        scale: [R, S, g], the model's dtype.
        zero: [R, S, g].
        exact: what the exempt tokens hold. [R, E, D].
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
        """The first `slots` slots of some rows."""
        return CodedWindow(self, rows, slots, position[rows])

    def extended(self, slots: int) -> Self:
        """Return a copy with `slots` slots, the new ones empty."""
        codes, scale, zero = (extended(x, slots, 0) for x in (self.codes, self.scale, self.zero))
        return type(self)(self.codec, codes, scale, zero, self.exact)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change` applied to every tensor."""
        return type(self)(self.codec, *(change(x) for x in (self.codes, self.scale, self.zero, self.exact)))

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Bytes that the tokens held take: of those that are exempt, as floats."""
        exempt = int((held & is_exempt(self.codec, position, position.amax(-1, keepdim=True))).sum())
        dims, itemsize = self.exact.shape[-1], self.exact.itemsize
        return exempt * dims * itemsize + (int(held.sum()) - exempt) * self.codec.bytes_of(dims, itemsize)


class CodedWindow(Window):
    """Some rows of a coded store."""

    def __init__(self, store: CodedStore, rows: slice, slots: int, account: Tensor) -> None:
        """account: of all slots of these rows, says which token is how old. [N, *] int64."""
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
        """Put vectors into slots, as codes, and into places for exempt ones."""
        parts = self._store.codes, self._store.scale, self._store.zero
        for part, new in zip(parts, encoded(x, self._codec), strict=True):
            part.flatten(0, 1).index_copy_(0, indices, new)
        if not self._codec.exempt or not len(indices):
            return
        rows = len(self._exact)
        order = self._order()
        place = self._place(order.flatten()[indices - self._first].view(rows, -1), order)
        source = place.new_full((rows, self._codec.exempt + 1), -1)  # the token that takes each place; the last for all others
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
        """Return tokens' places among the exempt; E for coded tokens. order: of tokens; of_all: of all slots. [N, n] int64."""
        codec = self._codec
        place = codec.sinks + order % codec.recent if codec.recent else order
        place = torch.where(order < codec.sinks, order, place)
        return torch.where(is_exempt(codec, order, of_all.amax(-1, keepdim=True)), place, codec.exempt)


class StoredView(CacheView):
    """View whose keys and values are read from their windows when a policy looks at them."""

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
        """keys: None if they are kept rotated, so that the view has none. Other arguments: as of `CacheView`."""
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
        position: of the slots. [R, 1, S] int64.
        rank: of the slots. [R, 1, S] int64.
        steps: of the run's tokens. [R, T, 1] int64.
        ranks: of the run's tokens. [R, T, 1] int64.

    Returns:
        Masks of (coded, exempt); for KIVI of (both coded, key coded, both exempt). [R, T, S] bool each; exactly one is true.
    """
    if isinstance(codec, Kivi):
        value, key = ranks - rank <= codec.residual, rank // codec.residual == ranks // codec.residual
        return [~value, value & ~key, key]
    exempt = is_exempt(codec, position, steps)
    return [~exempt, exempt]


def with_run(before: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """Return the slots with a run's tokens put into theirs. before: [N, S, D]; slots: [n] int64, row by row; x: [n, D]."""
    of_rows = x.unflatten(0, (len(before), -1))
    return before.scatter(1, slots.view(*of_rows.shape[:2], 1).expand_as(of_rows), of_rows)


def as_written(x: Tensor, position: Tensor, codec: Codec) -> Tensor:
    """Return tokens as they are read back right after they are stored. x: [..., D]; position: [...] int64 -> [..., D]."""
    exempt = is_exempt(codec, position, position)[..., None]
    return x if codec.codes_later else torch.where(exempt, x, decoded(*encoded(x, codec), codec.bits))


def encoded(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor, Tensor]:
    """Packed integers, scales and zeros. [..., D] -> [..., D * bits / 8] uint8, [..., g], [..., g].

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
    """The vectors: code * scale + zero. Arguments as `encoded` makes them. -> [..., D], dtype of the scale."""
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        codes = ((codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    float_dtype = torch.promote_types(scale.dtype, torch.float32)
    x = codes.to(float_dtype).unflatten(-1, (scale.shape[-1], -1)).mul_(scale[..., None]).add_(zero[..., None])
    return x.flatten(-2).to(scale.dtype)


def extended(x: Tensor, slots: int, fill: float) -> Tensor:
    """A tensor with more slots. [R, S, ...]."""
    longer = x.new_full((x.shape[0], slots, *x.shape[2:]), fill)
    longer[:, : x.shape[1]] = x
    return longer
