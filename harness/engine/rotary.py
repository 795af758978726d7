"""RoPE: measured on a model at load, and applied at attention time, at the positions of the position mode.

A layer's rotation is a frequency for every pair of key dims. It is measured, not taken from the code of a model family: among
the known layouts, it is the one that rotates the layer's queries and keys at position 0 into the model's own queries and keys at
position p (docs/decisions/0002). Cached keys have paired dims next to each other, so that a rotation is one complex product.

Axis letters: B streams, N rows of a layer, R rows of all layers, S slots, T tokens, D head dim, P = D / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.policies import PositionMode

_LEVEL = 4096  # rows of one table level; two levels reach _LEVEL**2 positions
_FAST_INTERLEAVE_MIN_ELEMENTS = 2**12
_FAST_INTERLEAVE_MIN_PAIRS = 8  # of a head; with fewer pairs, gathering is faster
LONGEST_STREAM = _LEVEL**2  # tokens


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE of one layer.

    Attributes:
        frequencies: frequency of each pair, in radians per position; 0 for pairs that RoPE does not rotate. [P] float64.
        order: the model's index of each dim, in an order with paired dims adjacent. [D] int64, on the model's device.
        halves: number of rotated pairs h, if pair i consists of dims i and i + h of the model; None for other layouts.
    """

    frequencies: Tensor
    order: Tensor
    halves: int | None = None
    _tables: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict, repr=False)
    _split_tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def pair(self, x: Tensor) -> Tensor:
        """Reorder the dims of vectors so that paired dims are adjacent. [..., D] -> [..., D]."""
        if self.halves is None or self.halves < _FAST_INTERLEAVE_MIN_PAIRS or x.numel() < _FAST_INTERLEAVE_MIN_ELEMENTS:
            return x.index_select(-1, self.order)
        first, second, rest = x.split([self.halves, self.halves, x.shape[-1] - 2 * self.halves], -1)
        if x.dtype in (torch.float32, torch.float64):
            paired = torch.view_as_real(torch.complex(first, second)).flatten(-2)
        else:
            paired = torch.stack([first, second], -1).flatten(-2)
        return paired if not rest.shape[-1] else torch.cat([paired, rest], -1)

    def factors(self, positions: Tensor, dtype: torch.dtype, longest: int) -> Tensor:
        """Return exp(i * position * frequency) for every pair, from float64 angles.

        Args:
            positions: any shape, each in [0, longest). int64.
            dtype: dtype of the vectors to rotate; vectors of 16-bit types are rotated in float32.
            longest: upper bound of the positions; above `_LEVEL`, the table has two levels.

        Returns:
            [*positions.shape, P], complex64 or complex128.
        """
        flat, shape = positions.reshape(-1), (*positions.shape, -1)
        complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        if (complex_dtype, _LEVEL) not in self._tables:
            self.prepare(dtype)
        table = self._tables[complex_dtype, 1]
        if longest <= _LEVEL:
            return table.index_select(0, flat).view(shape)
        high = self._tables[complex_dtype, _LEVEL].index_select(0, flat // _LEVEL)
        return (table.index_select(0, flat % _LEVEL) * high).view(shape)

    def tables(self, dtype: torch.dtype, longest: int) -> tuple[Tensor, Tensor | None, int]:
        """Return the factors at 0, 1, ..., [M, P], the factors at 0, M, 2 * M, ..., [M, P], and M.

        The second table is None if all positions below `longest` are in the first.
        """
        self.prepare(dtype)
        complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        return self._tables[complex_dtype, 1], None if longest <= _LEVEL else self._tables[complex_dtype, _LEVEL], _LEVEL

    def cosine_and_sine(self, rows: int, stride: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines at positions 0, stride, 2 * stride, ... [rows, P] float32, on the device of `order`."""
        if (rows, stride) not in self._split_tables:
            angles = self._angles(rows, stride)
            cosine, sine = (x.float().to(self.order.device) for x in (angles.cos(), angles.sin()))
            self._split_tables[rows, stride] = cosine, sine
        return self._split_tables[rows, stride]

    def prepare(self, dtype: torch.dtype) -> None:
        """Compute the tables now. They are computed on the host, for which no decode step should wait."""
        complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        for stride in (1, _LEVEL):  # the factors at positions 0, stride, 2 * stride, ... [_LEVEL, P]
            if (complex_dtype, stride) not in self._tables:
                angles = self._angles(_LEVEL, stride)
                table = torch.polar(torch.ones_like(angles), angles).to(complex_dtype)
                self._tables[complex_dtype, stride] = table.to(self.order.device)

    def _angles(self, rows: int, stride: int) -> Tensor:
        """Return the angles at positions 0, stride, 2 * stride, ... [rows, P] float64, on the CPU."""
        return torch.arange(rows, dtype=torch.float64)[:, None] * stride * self.frequencies.cpu()


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate paired vectors. [..., D] with [..., P] complex -> [..., D], dtype of x."""
    if x.dtype == torch.float32:
        return (x.view(torch.complex64) * factors).view(torch.float32)
    if x.dtype == torch.float64:
        return (x.view(torch.complex128) * factors).view(torch.float64)
    return (x.float().view(torch.complex64) * factors).view(torch.float32).to(x.dtype)


@dataclass(frozen=True)
class QueryFactors:
    """RoPE of queries.

    Attributes:
        factors: unit complex numbers. [B, 1, 1, T, P], or [N, 1, P] for a step.
    """

    factors: Tensor
    _scaled: dict[float, Tensor] = field(default_factory=dict)

    def rotated(self, query: Tensor, scaling: float) -> Tensor:
        """Rotate paired queries, and multiply them by the scaling of the scores. [..., D] -> [..., D].

        The factors times the scaling are computed once for all layers that share them.
        """
        if scaling not in self._scaled:
            self._scaled[scaling] = self.factors * scaling
        return rotate(query, self._scaled[scaling])


class Placement:
    """Positions that RoPE gives to the keys and queries of a cache, by position mode.

    Attributes:
        rotation: RoPE of the layers; None without RoPE.
        mode: position mode, which decides the position that RoPE gives to a cached token.
        limit: the largest distance of mode `clamped`, in tokens.
        max_position: upper bound of the positions for which RoPE is computed; the number of slots when None.
    """

    def __init__(self, rotation: Rotation | None, mode: PositionMode, limit: int, dtype: torch.dtype, keys_rotated: bool) -> None:
        """Compute the tables that every step needs.

        Args:
            keys_rotated: keys are stored rotated to their positions in the stream.
        """
        self.rotation, self.mode, self.limit, self._dtype, self._keys_rotated = rotation, mode, limit, dtype, keys_rotated
        self.max_position = {"stream": LONGEST_STREAM, "clamped": limit + 1}.get(mode)
        assert not keys_rotated or (mode == "stream" and rotation is not None)
        if rotation is not None:
            rotation.prepare(dtype)

    def of_queries(self, ranks: Tensor, steps: Tensor, slots: int) -> QueryFactors | None:
        """Return RoPE of queries; None without RoPE.

        Args:
            ranks: ranks of the queries' tokens. [...] int64.
            steps: steps of the queries' tokens. [...] int64.
            slots: number of slots of a row, an upper bound of ranks.

        Returns:
            [..., P].
        """
        if self.rotation is None:
            return None
        rope_positions = ranks if self.mode == "cache" else steps if self.mode == "stream" else torch.full_like(ranks, self.limit)
        return QueryFactors(self.rotation.factors(rope_positions, self._dtype, self.max_position or slots + 1))

    def of_keys(self, ranks: Tensor, positions: Tensor, steps: Tensor, slots: int) -> Tensor | None:
        """Return the RoPE that stored keys still need; None if they need none.

        Args:
            ranks: ranks of the tokens in the slots. [R, S] int64.
            positions: positions of these tokens in the stream. [R, S] int64.
            steps: step of the token that attends, by row. [R] int64. The rows of one layer use the first steps, which all layers
                share.
            slots: number of slots of a row, an upper bound of ranks.

        Returns:
            [R, S, P] complex.
        """
        if self.rotation is None or self._keys_rotated:
            return None
        if self.mode == "cache":
            rope_positions = ranks
        elif self.mode == "stream":
            rope_positions = positions.clamp(min=0)
        else:  # the query stands at `limit`, which bounds every distance
            rope_positions = self.limit - (steps[: len(ranks), None] - positions).clamp(0, self.limit)
        return self.rotation.factors(rope_positions, self._dtype, self.max_position or slots + 1)


def find_rotation(at_zero: Tensor, samples: dict[int, Tensor], tables: Iterable[Tensor]) -> Rotation | None:
    """Find the rotation that turns a layer's vectors at position 0 into its vectors at other positions.

    Args:
        at_zero: queries or keys that the model computes at position 0. [..., D].
        samples: queries or keys of the same tokens at other positions. {position: [..., D]}.
        tables: the model's own inverse frequencies. [M] each.

    Returns:
        The rotation; None if the layer does not rotate at all (NoPE).

    Raises:
        LookupError: no known layout reproduces the samples.
    """
    scale = at_zero.abs().amax().clamp(min=1e-30).item()
    tolerance = 2e-3 if at_zero.dtype in (torch.float32, torch.float64) else 5e-2
    if all((x - at_zero).abs().amax().item() <= tolerance * scale for x in samples.values()):
        return None
    for candidate in _candidates(at_zero.shape[-1], tables, at_zero.device):
        start = candidate.pair(at_zero)
        errors = [
            (rotate(start, candidate.factors(torch.tensor(p, device=start.device), start.dtype, p + 1)) - candidate.pair(x))
            .abs()
            .amax()
            .item()
            for p, x in samples.items()
        ]
        if max(errors) <= tolerance * scale:
            return candidate
    raise LookupError("no known RoPE layout reproduces its keys (learned or other absolute positions?)")


def _candidates(dims: int, tables: Iterable[Tensor], device: torch.device) -> Iterable[Rotation]:
    """Yield every layout in use: half-split or interleaved pairs, in the first or the last dims of a head."""
    for table in tables:
        pairs = table.numel()
        if 2 * pairs > dims or dims % 2:
            continue
        frequencies = torch.zeros(dims // 2, dtype=torch.float64)
        frequencies[:pairs] = table.detach().double().cpu()
        half = torch.arange(2 * pairs).view(2, pairs).T.reshape(-1)
        for start in dict.fromkeys((0, dims - 2 * pairs)):
            for layout in (half, torch.arange(2 * pairs)):
                rotated = layout + start
                rest = torch.tensor([d for d in range(dims) if not start <= d < start + 2 * pairs], dtype=torch.int64)
                halves = pairs if layout is half and start == 0 else None
                yield Rotation(frequencies, torch.cat([rotated, rest]).to(device), halves)
