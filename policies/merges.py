"""Merging: an evicted token leaves a part of its value, or of its key and value, in tokens that are kept.

Axis letters: B streams, H KV heads, S slots, E tokens evicted at once, D key dim, Dv value dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.policies.policy import Composed, Policy, PositionMode
from kvbench.policies.statistic import Statistic
from kvbench.policies.view import CacheView, Rotate

_BEYOND_RANKS = 2**40


@dataclass(frozen=True)
class Evicted:
    """Tokens that leave the cache, oldest first.

    Attributes:
        slots: their slots. [B, H, E] int64.
        real: False for entries without a token, in heads that evict fewer than E, and for tokens that no later query could see,
            in layers with a sliding window. [B, H, E] bool.
        kept: slots of all tokens that stay. [B, H, S] bool.
    """

    slots: Tensor
    real: Tensor
    kept: Tensor

    @classmethod
    def of(cls, evicted: Tensor, visible: Tensor, view: CacheView, most: int) -> Evicted:
        """Sort the evicted tokens by age.

        Args:
            evicted: [B, H, S] bool.
            visible: evicted tokens that a later query could see. [B, H, S] bool.
            most: E.
        """
        order = view.rank.masked_fill(~evicted, _BEYOND_RANKS)
        slots = order.topk(min(most, order.shape[-1]), largest=False).indices
        return cls(slots, visible.gather(-1, slots), view.valid & ~evicted)

    def take(self, x: Tensor) -> Tensor:
        """Values of the evicted tokens. [B, H, S, ...] -> [B, H, E, ...]."""
        return x.take_along_dim(self.slots.view(*self.slots.shape, *[1] * (x.dim() - 3)), 2)


class Merged(NamedTuple):
    """The cache after a merge. Only slots of kept tokens matter.

    Attributes:
        values: [B, H, S, Dv].
        keys: unrotated, as in the view; unchanged when None. [B, H, S, D].
        states: statistics that the merge changes. [B, H, S, *k] or [B, H, *k].
    """

    values: Tensor
    keys: Tensor | None = None
    states: Mapping[Statistic, Tensor] = {}


@dataclass(frozen=True)
class Merging(Composed):
    """A policy that evicts what `score` evicts, and merges evicted tokens into kept ones.

    `merge` is called before tokens are evicted: after a step, after several steps, or at the end of a prompt.
    """

    merges_keys: ClassVar[bool] = False  # True: positions must be `stream`, since a merged key belongs to one position

    @abstractmethod
    def merge(self, view: CacheView, evicted: Evicted) -> Merged:
        """Return the cache with the evicted tokens merged into the others. The view still holds the evicted tokens."""


def positions_for(policy: Policy) -> PositionMode:
    """The mode `cache`, or `stream` for a policy that works in no other."""
    return "stream" if isinstance(policy, Merging) and policy.merges_keys else "cache"


@dataclass(frozen=True)
class Nearest:
    """The kept token whose key is most similar to an evicted token's, by the cosine of rotated keys.

    Attributes:
        similarity: cosine; 0 where nothing is evicted. [B, H, E] float32.
        slot: slot of the kept token. [B, H, E] int64.
    """

    similarity: Tensor
    slot: Tensor
    rotated: Tensor = field(repr=False)  # all keys, rotated. [B, H, S, D] float32

    @classmethod
    def of(cls, view: CacheView, evicted: Evicted) -> Nearest:
        """Compare each evicted token's key with the keys of all kept tokens."""
        rotated = view.rotated_keys.to(torch.promote_types(view.keys.dtype, torch.float32))
        norm = rotated.norm(dim=-1).clamp(min=1e-6)
        cosine = evicted.take(rotated) @ rotated.mT / evicted.take(norm)[..., None] / norm[:, :, None]
        similarity, slot = cosine.masked_fill(~evicted.kept[:, :, None], -2).max(-1)
        return cls(similarity.masked_fill(~evicted.real, 0), slot, rotated)

    def total(self, x: Tensor) -> Tensor:
        """Sum vectors or numbers over all evicted tokens with the same nearest kept token. [B, H, E, ...] -> same shape."""
        number = torch.arange(self.slot.shape[-1], device=x.device).expand_as(self.slot)
        by_slot = number.new_zeros(self.rotated.shape[:3]).scatter(-1, self.slot, number)  # one evicted token of each kept token
        index = _expanded(by_slot.gather(-1, self.slot), x)
        return torch.zeros_like(x).scatter_add(2, index, x).gather(2, index)

    def take(self, x: Tensor) -> Tensor:
        """Vectors or numbers of the nearest kept tokens. [B, H, S, ...] -> [B, H, E, ...]."""
        return x.take_along_dim(self.slot.view(*self.slot.shape, *[1] * (x.dim() - 3)), 2)

    def put(self, into: Tensor, x: Tensor, changed: Tensor) -> Tensor:
        """Replace vectors of nearest kept tokens that `changed`. [B, H, S, D], [B, H, E, D], [B, H, E] bool -> as `into`."""
        return into.scatter(2, _expanded(self.slot, x), x.where(changed[..., None], self.take(into)))


def _expanded(index: Tensor, x: Tensor) -> Tensor:
    """Repeat an index for the vectors of x. [B, H, E], [B, H, E, ...] -> shape of x."""
    return index.view(*index.shape, *[1] * (x.dim() - 3)).expand(x.shape)


def unrotated(rotate: Rotate, rotated: Tensor, position: Tensor) -> Tensor:
    """Turn keys back from their positions in the stream. [B, H, E, D], [B, H, E] int64 -> [B, H, E, D].

    Paired dims are neighbours, so a rotation is a product with a complex number, and the way back is the product with its
    conjugate.
    """
    mirror = torch.ones(rotated.shape[-1], dtype=rotated.dtype, device=rotated.device)
    mirror[1::2] = -1
    return rotate(rotated * mirror, position.clamp(min=0)) * mirror
