"""The interface of a statistic: a number, or a tensor of them, that the engine keeps for every slot or every KV head.

Axis letters: B streams, H KV heads, G query heads of a KV head, S slots, D key dim, Dv value dim, E hidden size of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from kvbench.policies.view import CacheView, Rotate

Seen = Literal["weights", "logits", "queries", "outputs"]


class HeadSizes(NamedTuple):
    """Sizes of one KV head."""

    group: int  # G
    key_dim: int  # D
    value_dim: int  # Dv


class Attention(SimpleNamespace):
    """Attention of one token in one layer, with the attributes that the statistic names in `sees`.

    Raises:
        ValueError: an attribute is read that `sees` does not name.

    Attributes:
        weights: softmax weights; 0 in empty slots. [B, H, G, S] float32, float64 in a float64 model.
        logits: inputs of the softmax; -inf in empty slots. [B, H, G, S], same dtype as the weights.
        queries: unrotated, in the order of dims of the view's keys. [B, H, G, D], the model's dtype.
        outputs: the weighted sums of values. [B, H, G, Dv], the model's dtype.
    """

    weights: Tensor
    logits: Tensor
    queries: Tensor
    outputs: Tensor

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(f"a statistic that reads attention.{name} must name it in `sees`")


@dataclass
class Written:
    """Tokens when they are written into the cache, one per KV head. *n is [B, H], with any further axes after it.

    Attributes:
        keys: unrotated, in the order of dims of the view's keys. [*n, D], the model's dtype.
        values: [*n, Dv], the model's dtype.
        position: in the stream. Broadcasts to [*n]; int64.
        ids: token ids. Broadcasts to [*n]; int64.
        rotate: RoPE of this layer.
        output: slices of the output projection, one per query head; None if the model has no such matrix. [H, G, E, Dv].
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    ids: Tensor
    rotate: Rotate
    output: Tensor | None = None

    @property
    def rotated_keys(self) -> Tensor:
        """Keys rotated to their positions in the stream. [*n, D]."""
        return self.rotate(self.keys, self.position.expand(self.keys.shape[:-1]))


@dataclass(frozen=True)
class Statistic:
    """A pure update rule. Its fields are its parameters: two that compare equal are one statistic.

    Attributes:
        sees: what `update` reads of a step's attention. Nothing else is computed.
        per: "slot": a value for every cached token. "head": one for every KV head, in float64.
        initial: value of a slot when it takes a token, and of a head at the start.
        lasts: it is also updated in caches that no longer evict.
    """

    sees: ClassVar[tuple[Seen, ...]] = ("weights",)
    per: ClassVar[Literal["slot", "head"]] = "slot"
    initial: ClassVar[float] = 0.0
    lasts: ClassVar[bool] = False

    @property
    def last(self) -> int | None:
        """Number of last steps that matter, of a prompt that is read before anything is evicted; None: all.

        The engine then reads the steps before them without this statistic, as fast as if it were not there.
        """
        return None if self.sees else 0

    def shape(self, sizes: HeadSizes) -> tuple[int, ...]:
        """The axes *k of a slot's, or a head's, value."""
        return ()

    def written(self, token: Written) -> Tensor | None:
        """A value computed once, when a token is written. [*n, *k]; None if there is none.

        It is the first value of the token's slot. If the statistic is kept per head, it is added to the head's value, and
        subtracted again when the token is evicted: a sum over the tokens that the head holds.
        """
        return None

    def update(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """The state after one step, as a new tensor. Not called if `sees` is empty.

        Args:
            state: before the step. [B, H, S, *k] float32, or [B, H, *k] float64.
            attention: of this step.
            view: the cache, with the new token in it.
        """
        return state

    def update_run(self, state: Tensor, attention: Attention, view: CacheView) -> Tensor:
        """Return the state after T steps without an eviction. Optional: faster than T calls of `update`, with an equal result.

        Args:
            state: before the steps; tokens written during the steps have their first value.
            attention: of the steps, with an axis T after G: weights and logits [B, H, G, T, S], queries [B, H, G, T, D], outputs
                [B, H, G, T, Dv]. A token that came later has weight 0.
            view: the cache after the last step; it may also hold later tokens.

        Raises:
            NotImplementedError: the statistic has no such rule.
        """
        raise NotImplementedError
