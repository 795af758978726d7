"""The configuration and the interface of a decoder.

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
    """Which tokens a decoder keeps, and where RoPE puts them.

    Attributes:
        policy: not yet bound to the capacity.
        capacity: tokens per KV head kept between steps; None for a policy that never evicts.
        positions: where RoPE puts a cached token.
        limit: largest distance in position mode `clamped`, in tokens; the model's training length when None.
        seed: of the policy's random numbers.
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
        """Read a block.

        Args:
            tokens: [B, T] int64.
            valid: tokens that count; all when None. An invalid token changes nothing, and its logits are
                meaningless. [B, T] bool.
            keep: indices of the tokens whose logits to return; all when None. [K] int64.

        Returns:
            Logits for the token after each. [B, T or K, V], the model's dtype.
        """

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens now, so that no step has to allocate."""

    def fork(self, streams: Sequence[int]) -> Decoder:
        """A decoder whose streams are copies of these, with nothing shared."""

    def held(self, positions: Sequence[int]) -> float:
        """Share of these tokens of the first stream that are held, over layers and KV heads. Syncs with the host."""

    @property
    def slots(self) -> tuple[float, float]:
        """(slots in use, slots a decode step attends over), per KV head, averaged over layers."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V held between steps."""

    @property
    def state_bytes(self) -> int:
        """Bytes of everything else held between steps."""
