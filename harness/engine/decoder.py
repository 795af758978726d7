"""The configuration and the interface of a decoder.

Axis letters: B streams, T tokens, V vocabulary, H KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvbench.harness.core.codec import Codec
from kvbench.harness.core.device import free_bytes
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.evict import Evict, Pages, at_once, pages_of
from kvbench.harness.core.parameters import all_policies_inside
from kvbench.policies import Policy, PositionMode, Selecting
from kvbench.policies.merges import Merging

if TYPE_CHECKING:
    from kvbench.harness.engine.model import Model


@dataclass(frozen=True)
class CacheConfig:
    """Configuration of a decoder's cache: which tokens are kept, and the positions RoPE gives them.

    Attributes:
        policy: policy, not yet bound to the capacity.
        capacity: tokens per KV head kept between steps; None for a policy that never evicts.
        positions: position mode, which decides the position that RoPE gives to a cached token.
        limit: largest distance in position mode `clamped`, in tokens; the model's training length when None.
        seed: seed of the policy's random numbers.
        evict: time of evictions. 1: after every token. b: the cache grows to capacity + b tokens, then b tokens are evicted at
            once. "prompt": once, at the end of a prompt that is read under full attention; afterwards the cache grows. Pages:
            as for b = page size, but whole pages are evicted.
        kv: codec of stored K and V; None stores them in the model's dtype. A prompt that is cut is stored in the model's dtype
            until its end.
    """

    policy: Policy
    capacity: int | None = None
    positions: PositionMode = "cache"
    limit: int | None = None
    seed: int = 0
    evict: Evict = 1
    kv: Codec | None = None

    def __post_init__(self) -> None:
        name, takes_capacity = type(self.policy).__name__, self.policy.evicts and not self.policy.outcome
        if (self.capacity is None) == takes_capacity:
            raise ValueError(f"{name} needs a capacity" if takes_capacity else f"{name} takes no capacity")
        if self.every < 1:
            raise ValueError(f"evict every {self.every} tokens, expected 1 or more")
        if self.pages is not None and self.capacity is not None and self.capacity % self.pages.size:
            raise ValueError(f"evict: {self.capacity} tokens don't make up whole pages of {self.pages.size}")
        if not self.policy.caches and self.evict != 1:
            raise ValueError(f"{name} keeps no cache, so there is nothing to evict: leave `evict` out")
        if self.policy.outcome and self.evict != "prompt":
            raise ValueError(f"{name} decides at a prompt's end how much it keeps: it needs evict: prompt")
        if self.kv is not None and not self.policy.caches:
            raise ValueError(f"{name} keeps no cache, so there is nothing to code: leave `kv` out")
        self._refuse_merging()
        self._refuse_selecting()
        refused = "" if self.kv is None else self.kv.why_not(self.positions, self.policy.evicts and self.evict != "prompt")
        if refused:
            raise ValueError(refused)

    def _refuse_merging(self) -> None:
        """Refuse caches into which evicted tokens can't be merged.

        Raises:
            ValueError: names the reason.
        """
        name = type(self.policy).__name__
        inside = [type(p).__name__ for p in all_policies_inside(self.policy) if isinstance(p, Merging)]
        if inside:
            raise ValueError(f"{inside[0]} merges evicted tokens, so no policy can be around it: it must be around {name}")
        if not isinstance(self.policy, Merging):
            return
        if self.kv is not None:
            raise ValueError(f"{name} changes stored values, which `kv` would code again at every step: leave kv out")
        if self.policy.merges_keys and self.positions != "stream":
            raise ValueError(f"{name} merges keys, which belong to one position: positions must be stream")
        if self.capacity is not None and self.evict != "prompt" and self.policy.bind(self.capacity).pool_floor(self.capacity):
            raise ValueError(f"{name} can't merge where heads compete for slots: it needs evict: prompt")

    def _refuse_selecting(self) -> None:
        """Refuse caches from which a policy can't select.

        Raises:
            ValueError: names the reason.
        """
        if not isinstance(self.policy, Selecting):
            return
        name = type(self.policy).__name__
        if self.kv is not None:
            raise ValueError(f"{name} reads single tokens of the cache, which `kv` stores together: leave kv out")
        if self.positions == "clamped":
            raise ValueError(f"{name} compares keys at the positions of the stream: positions must be cache or stream")
        if self.policy.statistics:
            raise ValueError(f"{name} selects tokens, and keeps no statistics")
        if self.evict not in (1, "prompt"):
            raise ValueError(f"{name} evicts nothing: evict must be step or prompt")

    @property
    def every(self) -> int:
        """Number of tokens evicted at once."""
        return at_once(self.evict)

    @property
    def pages(self) -> Pages | None:
        """Pages that are evicted as a whole; None if single tokens are evicted."""
        return pages_of(self.evict) if self.policy.evicts else None


def refuse_too_large(model: Model, config: CacheConfig) -> None:
    """Refuse a capacity whose slots don't fit into memory."""
    if config.capacity is None:
        return
    needed, free = model.kv_bytes(config.capacity + config.every - 1, codec=config.kv), free_bytes(model.device)
    if needed > free:
        raise UserError(
            f"capacity {config.capacity:,}: its slots take {needed / 2**30:,.1f} GiB, but only {free / 2**30:,.1f} are free"
        )


def read_blocks(read: Decoder, tokens: Tensor, block: int) -> Tensor:
    """Read tokens in blocks. [B, N] int64 -> logits after the last one, [B, V]."""
    for part in tokens.split(block, 1):
        logits = read(part, keep=torch.full((1,), part.shape[1] - 1, device=tokens.device))
    return logits[:, -1]


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
            Logits of the token that follows each token. [B, T or K, V], the model's dtype.
        """

    def read_prompt(self, tokens: Tensor, block: int, once: bool = False) -> Tensor:
        """Read the prompt of every stream, before anything else.

        Args:
            tokens: prompts of one length. [B, N] int64.
            block: tokens of each stream that pass a layer at once.
            once: read the prompt under full attention, evict once at its end, and follow the configuration afterwards. A
                configuration with `evict="prompt"` always does so.

        Returns:
            Logits after the last token. [B, V].
        """

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens now, so that no step has to allocate."""

    def fork(self, streams: Sequence[int]) -> Decoder:
        """Return a decoder whose streams are copies of the given streams. The decoders share no cache."""

    def held(self, positions: Sequence[int]) -> float | None:
        """Return the share of these positions of the first stream that is held, over layers and KV heads; None if unknown.

        Syncs with the host.
        """

    @property
    def slots(self) -> tuple[float, float]:
        """(slots in use, slots a decode step attends over), per KV head, averaged over layers."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V held between steps."""

    @property
    def held_bytes(self) -> int:
        """Bytes of K and V of the tokens held, without free slots. Syncs with the host."""

    @property
    def state_bytes(self) -> int:
        """Bytes of everything else held between steps."""
