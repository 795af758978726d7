"""View of one layer's cache, which is passed to a policy.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, D key dim, Dv value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvbench.policies.statistic import Statistic

# Any odd 64-bit constants with well-mixed bits would do.
_HASH_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, 6364136223846793005, 2862933555777941757)

Rotate = Callable[[Tensor, Tensor], Tensor]  # ([..., D] unrotated, positions [...] int64) -> [..., D] rotated


def mixed_seed(seed: int) -> int:
    """Return the seed's term in the hash of `CacheView.uniform`, wrapped at 64 bits as int64 tensors are."""
    return (seed * _HASH_MULTIPLIERS[3] + 2**63) % 2**64 - 2**63


def unrotated(x: Tensor, position: Tensor) -> Tensor:  # noqa: ARG001 - a layer without RoPE has no use for it
    """Return x: the rotation of a layer without RoPE."""
    return x


@dataclass
class CacheView:
    """One layer's cache after a step, as a policy sees it. Read only.

    Attributes:
        rank: the token's place among those its KV head holds, 0 = oldest; S or more if the slot is empty. [B, H, S] int64.
        position: the token's index in its stream; -1 if the slot was never used. [B, H, S] int64.
        step: index of the token just processed, per stream. [B, 1, 1] int64.
        keys: unrotated keys; pairs of dims that RoPE rotates together are neighbours. [B, H, S, D], the model's dtype.
        values: [B, H, S, Dv], the model's dtype.
        states: one tensor per statistic that the policy declares. [B, H, S, *k], or [B, H, *k] for one that is kept per head.
        layer: index of the layer. A view may show several layers at once, stacked along B. [B, 1, 1] int64.
        head: index of each KV head in the model's layer; a view may show some of them. Broadcasts to [B, H, 1]; int64.
        prompt: tokens of the stream's prompt, 0 if it has none. Broadcasts to [B, 1, 1]; int64.
        num_layers: number of layers of the model.
        seed: the cell's seed.
        rotate: RoPE of this layer, as the model applies it to a key or query at a position of the stream.
        full: every slot is known to hold a token.
    """

    rank: Tensor
    position: Tensor
    step: Tensor
    keys: Tensor
    values: Tensor
    states: dict[Statistic, Tensor]
    layer: Tensor
    head: Tensor
    prompt: Tensor
    num_layers: int = 1
    seed: int = 0
    rotate: Rotate = field(default=unrotated)
    full: bool = False

    @property
    def age(self) -> Tensor:
        """Steps since the token was processed, 0 = newest. Meaningless where not `valid`. [B, H, S] int64."""
        return self.step - self.position

    @property
    def valid(self) -> Tensor:
        """Whether the slot holds a token. [B, H, S] bool."""
        return self.rank < self.rank.shape[-1]

    @property
    def count(self) -> Tensor:
        """Tokens that each KV head holds. [B, H, 1] int64."""
        return self.valid.sum(-1, keepdim=True)

    @property
    def rotated_keys(self) -> Tensor:
        """Keys rotated to their positions in the stream, in every position mode, as public code scores them. [B, H, S, D]."""
        return self.rotate(self.keys, self.position.clamp(min=0))

    @property
    def tokens(self) -> Tensor:
        """Token ids. The policy must declare the statistic `TokenId()`. [B, H, S] int64.

        Raises:
            ValueError: the policy does not declare it.
        """
        from kvbench.policies.statistics import TokenId

        return self.state(TokenId()).long()

    def state(self, statistic: Statistic) -> Tensor:
        """The value of a running statistic. [B, H, S, *k] float32 (float64 in a float64 model), or [B, H, *k] float64 per head.

        Raises:
            ValueError: the policy does not declare this statistic in `statistics`.
        """
        if statistic not in self.states:
            raise ValueError(f"statistic {statistic} is not in the policy's `statistics`")
        return self.states[statistic]

    def by_rank(self, x: Tensor) -> Tensor:
        """Values of slots, put in order of rank: the oldest token's first, empty slots last. [B, H, S, ...] -> same shape."""
        places = self._places()
        slots = torch.arange(places.shape[-1], device=places.device).expand_as(places)
        return _take(x, torch.empty_like(places).scatter_(-1, places, slots))

    def by_slot(self, x: Tensor) -> Tensor:
        """The inverse of `by_rank`. [B, H, S, ...] -> same shape."""
        return _take(x, self._places())

    def _places(self) -> Tensor:
        """The place of each slot in `by_rank`: its token's rank, or one after all tokens. [B, H, S] int64."""
        if self.full:
            return self.rank
        empty = ~self.valid
        return torch.where(empty, self.count + empty.cumsum(-1) - 1, self.rank)

    def uniform(self) -> Tensor:
        """A random number in [0, 1) for every token. [B, H, S] float32.

        It is a hash of (seed, layer, head, position), so batch size, block size and slot order do not change it.
        """
        return uniform(self.position, self.head, self.layer, self.seed)


def uniform(position: Tensor, head: Tensor, layer: Tensor | int, seed: int) -> Tensor:
    """A random number in [0, 1) for each position, head and layer: a hash. The arguments broadcast, int64. -> float32."""
    by_position, by_head, by_layer, _ = _HASH_MULTIPLIERS
    if isinstance(layer, int):  # products of tensors wrap at 64 bits
        layer = torch.full((), layer, dtype=torch.int64, device=position.device)
    x = position * by_position + head * by_head + layer * by_layer + mixed_seed(seed)
    for multiplier in (by_position, by_head):
        x = (x ^ (x >> 29)) * multiplier
    return ((x >> 40) & 0xFFFFFF).float() / 2**24


def _take(x: Tensor, order: Tensor) -> Tensor:
    if x.shape == order.shape:
        return x.gather(2, order)
    return x.take_along_dim(order.view(*order.shape, *[1] * (x.dim() - order.dim())), 2)
