"""Codecs: formats in which a cache stores K and V with a few bits per number, not in the model's dtype. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Keys = Literal["unrotated", "rotated"]
QUANTIZED_CACHE = "hf:QuantizedCache"
BITS = {"int8": 8, "int4": 4, "int2": 2, "kivi4": 4, "kivi2": 2}  # bits per number of each codec


@dataclass(frozen=True)
class Codec:
    """Codec that rounds to nearest, between the smallest and the largest number of a group of channels of one token and head.

    Attributes:
        name: codec name, a key of `BITS`.
        group: channels that share a scale and a zero; a head with fewer channels is one group.
        sinks: first tokens of a stream, which stay in the model's dtype.
        recent: newest tokens, the current token included, which stay in the model's dtype. A token is coded when it is no
            longer one of the `recent` newest.
        keys: whether keys are coded before RoPE, or rotated to their positions in the stream.
    """

    name: str
    group: int = 32
    sinks: int = 0
    recent: int = 0
    keys: Keys = "unrotated"

    @property
    def bits(self) -> int:
        """Bits per coded number."""
        return BITS[self.name]

    @property
    def exempt(self) -> int:
        """Largest number of tokens per head that are held in the model's dtype."""
        return self.sinks + self.recent

    @property
    def codes_later(self) -> bool:
        """Whether a token is coded some steps after it was read."""
        return self.recent > 0

    def why_not(self, positions: str, evicts: bool) -> str:
        """Return the reason that a cache can't use this codec; empty if it can.

        Args:
            evicts: whether tokens are evicted while later tokens are read.
        """
        if self.keys == "rotated" and positions != "stream":
            return "kv: keys: rotated needs positions: stream, where a key's angle never changes"
        return ""

    def refuse_unfit(self, dims: int) -> None:
        """Check that heads of this many channels can be coded.

        Raises:
            ValueError: the channels can't be cut into groups, or the coded numbers don't fill whole bytes.
        """
        size = min(self.group, dims)
        if dims % size or dims * self.bits % 8:
            raise ValueError(f"kv: heads of {dims} channels can't be cut into groups of {size} in whole bytes of {self.name}")

    def groups(self, dims: int) -> int:
        """Return the number of groups of channels in a head."""
        return -(-dims // self.group)

    def bytes_of(self, dims: int, itemsize: int) -> int:
        """Return the bytes of one coded vector: its numbers, and a scale and a zero per group.

        Args:
            itemsize: bytes of a number in the model's dtype.
        """
        return dims * self.bits // 8 + 2 * self.groups(dims) * itemsize

    def allocated(self, slots: int, key_dim: int, value_dim: int, itemsize: int) -> int:
        """Return the bytes of K and V of the slots of one head: a code per slot, and space for the exempt tokens."""
        return sum(slots * self.bytes_of(d, itemsize) + self.exempt * d * itemsize for d in (key_dim, value_dim))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Codec:
        """Return the codec that `as_json` wrote."""
        name, group, keys = value["codec"], value["group"], value.get("keys", "unrotated")
        if value.get("residual") is not None:
            return Kivi(name, group, keys=keys, residual=value["residual"])
        return cls(name, group, **value["exempt"], keys=keys)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form that suites and records use. The default value of `keys` is left out."""
        rotated = {} if self.keys == "unrotated" else {"keys": self.keys}
        return {"codec": self.name, "group": self.group} | self._floats_as_json() | rotated

    def _floats_as_json(self) -> dict[str, Any]:
        """Return the JSON entry of the tokens that are exempt from coding and stay in the model's dtype."""
        return {"exempt": {"sinks": self.sinks, "recent": self.recent}}

    def _words(self) -> list[str]:
        words = [f"sinks {self.sinks}"] if self.sinks else []
        return [*words, *([f"recent {self.recent}"] if self.recent else [])]

    def __str__(self) -> str:
        """Return the label: the codec's name, then every setting that differs from its default."""
        group = [f"group {self.group}"] if self.group != 32 else []
        return " ".join([self.name, *group, *self._words(), *(["rotated"] if self.keys == "rotated" else [])])


@dataclass(frozen=True)
class Kivi(Codec):
    """KIVI: keys per channel over groups of tokens, values per token over groups of channels, and a residual in floats.

    Tokens are counted in the order in which the cache received them. Keys are coded in blocks of `residual` tokens, each as soon
    as it is complete. A value is coded after `residual` newer values have been received.

    Source: Liu et al. 2024, arXiv:2402.02750, Section 3.3, Algorithm 1; jy-yuan/KIVI, models/llama_kivi.py.

    Attributes:
        group: tokens whose keys share a scale and a zero in each channel, and channels of a value that share a scale and a zero.
        residual: newest tokens that are held as floats; a multiple of `group`.
    """

    residual: int = 128

    def __post_init__(self) -> None:
        if self.sinks or self.recent:
            raise ValueError(f"kv: {self.name} exempts no tokens but its residual: leave exempt out")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(f"kv: the residual of {self.name}, {self.residual}, is no multiple of its group, {self.group}")

    @property
    def codes_later(self) -> bool:
        """Whether a token is coded some steps after it was read: always."""
        return True

    @property
    def of_values(self) -> Codec:
        """Codec of values. A step reads its own value and the `residual` values before it as floats."""
        return Codec(f"int{self.bits}", self.group, recent=self.residual + 1)

    def why_not(self, positions: str, evicts: bool) -> str:
        """Return the reason that a cache can't use this codec; empty if it can.

        Caches that evict while tokens are read are refused, because a token can't be removed from a coded group.
        """
        if evicts:
            return f"kv: {self.name} codes groups of tokens, which can't lose one: it needs evict: prompt, or dense"
        return super().why_not(positions, evicts)

    def refuse_unfit(self, dims: int) -> None:
        """Check the channels as `Codec.refuse_unfit` does, and that a group of tokens fills whole bytes."""
        super().refuse_unfit(dims)
        if self.group * self.bits % 8:
            raise ValueError(f"kv: groups of {self.group} tokens don't fill whole bytes of {self.name}")

    def block_bytes(self, dims: int, itemsize: int) -> int:
        """Return the bytes of a block of `residual` coded keys."""
        return dims * (self.residual * self.bits // 8 + 2 * (self.residual // self.group) * itemsize)

    def allocated(self, slots: int, key_dim: int, value_dim: int, itemsize: int) -> int:
        """Return the bytes of K and V of the slots of one head: blocks of coded keys, the key residual as floats, and values."""
        keys = slots // self.residual * self.block_bytes(key_dim, itemsize) + self.residual * key_dim * itemsize
        return keys + self.of_values.allocated(slots, 0, value_dim, itemsize)

    def _floats_as_json(self) -> dict[str, Any]:
        return {"residual": self.residual}

    def _words(self) -> list[str]:
        return [f"residual {self.residual}"] if self.residual != 128 else []


def quantized_cache(parameters: Mapping[str, Any]) -> str:
    """Return a label of the format in which transformers' quantized cache stores K and V.

    Args:
        parameters: the cache's parameters that differ from their defaults.
    """
    names = {"q_group_size": "group", "residual_length": "residual", "axis_key": "key axis", "axis_value": "value axis"}
    settings = [f"{word} {parameters[name]}" for name, word in names.items() if name in parameters]
    backend = str(parameters.get("backend"))
    return " ".join([backend if backend == "fp8" else f"{backend}{parameters.get('nbits', 4)}", *settings])
