"""When tokens are evicted, and how many a KV head holds until then."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Cadence:
    """How many tokens a KV head holds as its stream goes on, which the host knows without looking at the cache.

    Attributes:
        capacity: tokens held after an eviction; None if nothing is evicted any more.
        every: tokens evicted at once. They go as soon as `capacity + every` are held.
        origin: tokens read when `capacity` were first held: the capacity itself, or the length of a prompt that was cut to it.
        dropped: tokens read that were not held when eviction ended; 0 unless a prompt was cut.
    """

    capacity: int | None
    every: int = 1
    origin: int = 0
    dropped: int = 0

    @classmethod
    def from_start(cls, capacity: int | None, every: int = 1) -> Cadence:
        """Of a stream whose cache fills token by token."""
        return cls(capacity, every, capacity or 0)

    def after(self, prompt: int, held: int) -> Cadence:
        """The same, from the end of a prompt of which at most `held` tokens a head are held."""
        if self.capacity is None:
            return Cadence(None, self.every, 0, prompt - held)
        return Cadence(self.capacity, self.every, max(prompt, self.capacity))

    def held(self, seen: int) -> int:
        """Tokens held after `seen` tokens were read."""
        if self.capacity is None:
            return seen - self.dropped
        return seen if seen < self.origin else self.capacity + (seen - self.origin) % self.every

    def held_of(self, seen: Tensor) -> Tensor:
        """The same for numbers of tokens that only the device knows. Any shape, int64."""
        if self.capacity is None:
            return seen - self.dropped
        return seen.where(seen < self.origin, self.capacity + (seen - self.origin) % self.every)

    def evicts(self, seen: int) -> bool:
        """Whether tokens are evicted after the last of `seen` tokens."""
        return self.capacity is not None and seen > self.origin and (seen - self.origin) % self.every == 0

    def runs(self, seen: int, tokens: int) -> list[int]:
        """The lengths of the runs that a block is cut into, so that evictions fall only at their ends."""
        if self.capacity is None:
            return [tokens]
        end, lengths = seen + tokens, list[int]()
        while seen < end:
            due = self.origin + self.every * (max(0, seen - self.origin) // self.every + 1)
            lengths.append(min(due, end) - seen)
            seen += lengths[-1]
        return lengths
