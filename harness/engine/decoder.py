"""What a decoder is asked to keep, and what every decoder can do.

Axis letters: B streams, T tokens, V vocabulary, H KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvbench.policies import Policy, PositionMode


@dataclass(frozen=True)
class CacheConfig:
    """What a decoder is asked to keep.

    Attributes:
        policy: unbound.
        capacity: tokens per KV head kept between steps; None for a policy that never evicts.
        positions: where RoPE puts a cached token.
        limit: largest distance of mode `clamped`, in tokens; the model's training length when None.
        seed: of the policy's randomness.
    """

    policy: Policy
    capacity: int | None = None
    positions: PositionMode = "cache"
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.capacity is None) == self.policy.evicts:
            name = type(self.policy).__name__
            raise ValueError(f"{name} needs a capacity" if self.policy.evicts else f"{name} takes no capacity")


class Decoder(Protocol):
    """Reads B streams, a block of tokens at a time."""

    def __call__(self, tokens: Tensor, valid: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """Take a block in.

        Args:
            tokens: [B, T] int64.
            valid: which of them count; all when None. An invalid token changes nothing and its logits mean
                nothing. [B, T] bool.
            keep: indices of the tokens whose logits are wanted; all when None. [K] int64.

        Returns:
            Logits for the token after each. [B, T or K, V], the model's dtype.
        """

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens now, so that no step has to."""

    def fork(self, streams: Sequence[int]) -> Decoder:
        """A decoder whose streams are copies of these, nothing shared."""

    def held(self, positions: Sequence[int]) -> float:
        """Share of (layer, KV head, token) still held, of these tokens of the first stream. Syncs with the host."""

    @property
    def slots(self) -> tuple[float, float]:
        """Slots that hold a token, and slots a decode step's attention runs over; means over layers, per KV head."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V held between steps."""

    @property
    def state_bytes(self) -> int:
        """Bytes of everything else held between steps."""
