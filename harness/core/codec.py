"""How a cache stores K and V, where it isn't the model's dtype: a few bits a number. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Keys = Literal["unrotated", "rotated"]
BITS = {"int8": 8, "int4": 4, "int2": 2}  # of a number, by codec


@dataclass(frozen=True)
class Codec:
    """Round to nearest, between the smallest and the largest number of a group of channels of one token and head.

    Attributes:
        name: says the bits of a number.
        group: channels that share a scale and a zero; all of a head that has fewer.
        sinks: first tokens of a stream, which stay in the model's dtype.
        recent: newest tokens, the one being processed included, which do too. A token is coded when it is no longer among them.
        keys: whether keys are coded before RoPE, or rotated to their positions in the stream.
    """

    name: str
    group: int = 32
    sinks: int = 0
    recent: int = 0
    keys: Keys = "unrotated"

    @property
    def bits(self) -> int:
        """Of a number."""
        return BITS[self.name]

    @property
    def exempt(self) -> int:
        """The most tokens per head that are held in the model's dtype."""
        return self.sinks + self.recent

    def refuse_unfit(self, dims: int) -> None:
        """Check that heads of this many channels can be coded.

        Raises:
            ValueError: they can't be cut into groups, or numbers don't fill whole bytes.
        """
        size = min(self.group, dims)
        if dims % size or dims * self.bits % 8:
            raise ValueError(f"kv: heads of {dims} channels can't be cut into groups of {size} in whole bytes of {self.name}")

    def groups(self, dims: int) -> int:
        """Groups of channels in a head."""
        return -(-dims // self.group)

    def bytes_of(self, dims: int, itemsize: int) -> int:
        """Bytes of one coded vector: its numbers, and a scale and a zero per group. itemsize: of the model's dtype."""
        return dims * self.bits // 8 + 2 * self.groups(dims) * itemsize

    def allocated(self, slots: int, dims: int, itemsize: int) -> int:
        """Bytes of the slots of one head: a code for each, and room for the exempt tokens beside them."""
        return slots * self.bytes_of(dims, itemsize) + self.exempt * dims * itemsize

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Codec:
        """The codec that `as_json` wrote."""
        exempt = value["exempt"]
        return cls(value["codec"], value["group"], exempt["sinks"], exempt["recent"], value.get("keys", "unrotated"))

    def as_json(self) -> dict[str, Any]:
        """The codec as a suite and a record write it, all of it but a default of `keys`."""
        rotated = {} if self.keys == "unrotated" else {"keys": self.keys}
        return {"codec": self.name, "group": self.group, "exempt": {"sinks": self.sinks, "recent": self.recent}} | rotated

    def __str__(self) -> str:
        """In words, for a label."""
        words = [self.name, *([f"group {self.group}"] if self.group != 32 else [])]
        words += [f"sinks {self.sinks}"] if self.sinks else []
        words += [f"recent {self.recent}"] if self.recent else []
        return " ".join([*words, *(["rotated"] if self.keys == "rotated" else [])])
