"""A block's plan: decided once, when the block comes, and then passed through the layers unchanged.

Axis letters: L layers, B streams, H KV heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, P pairs of
dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvbench.harness.engine.closed_form import ClosedForm
from kvbench.harness.engine.kernels.choose import StepKernel, WalkKernel
from kvbench.harness.engine.rows import Rows


@dataclass(frozen=True)
class Block:
    """A block of tokens, placed in their streams.

    Attributes:
        steps: each token's index in its stream. [B, T] int64.
        valid: tokens that count; all when None. [B, T] bool.
        seen: tokens of each stream before the block; None when streams differ in length.
    """

    steps: Tensor
    valid: Tensor | None
    seen: int | None

    @property
    def tokens(self) -> int:
        """T."""
        return self.steps.shape[1]

    @property
    def end(self) -> int | None:
        """Tokens of each stream up to the end of the block; None when streams differ in length."""
        return None if self.seen is None else self.seen + self.tokens


@dataclass(frozen=True)
class QueryFactors:
    """RoPE of a block's queries.

    Attributes:
        factors: unit complex numbers. [B, 1, 1, T, P], or [B, 1, 1, P] for a step.
    """

    factors: Tensor
    _scaled: dict[float, Tensor] = field(default_factory=dict)

    def scaled(self, scaling: float) -> Tensor:
        """The factors times the scaling of scores; computed once for all layers that share it. Same shape."""
        if scaling not in self._scaled:
            self._scaled[scaling] = self.factors * scaling
        return self._scaled[scaling]


@dataclass(frozen=True)
class Places:
    """Where a block's tokens go, in every row of the slots it is walked in: one entry a token.

    Attributes:
        ranks: rank of the token, or that of an empty slot if it does not count. [R] int64 each.
        steps: its index in its stream. [R] int64 each.
        now: the same for a policy's view. [L * B, 1, 1] int64 each.
        valid: whether it counts; None if all do. [L * B, 1, 1] bool each.
        room: tokens of the block that find an unused slot to follow them; None if the host can't know, or all do.
        ragged: streams differ in length, so only the device knows which of them are full.
    """

    ranks: Sequence[Tensor]
    steps: Sequence[Tensor]
    now: Sequence[Tensor]
    valid: Sequence[Tensor | None]
    room: int | None
    ragged: bool

    def evicts(self, t: int) -> bool:
        """Whether, as far as the host knows, every stream must evict after token t."""
        return self.room is not None and t >= self.room


@dataclass(frozen=True)
class Fill:
    """Nothing is evicted before the block ends: causal attention in one go, rank = position = slot."""

    seen: int


@dataclass(frozen=True)
class Closed:
    """What every token sees is known beforehand: banded attention in one go.

    Attributes:
        form: that computes it.
        seen: tokens before the block.
        ordered: the slots hold their tokens oldest first.
    """

    form: ClosedForm
    seen: int
    ordered: bool


@dataclass(frozen=True)
class CompiledWalk:
    """A kernel walks the block inside each layer.

    Attributes:
        kernel: that walks.
        query_factors: None without RoPE, and where the kernel rotates.
        attended: slots it looks at.
        seen: tokens before the block.
        ordered: the slots hold their tokens oldest first.
    """

    kernel: WalkKernel
    query_factors: QueryFactors | None
    attended: int
    seen: int
    ordered: bool


@dataclass(frozen=True)
class PlainWalk:
    """The definition: the block is walked token by token inside each layer.

    Attributes:
        places: of its tokens, for the rows of one layer.
        query_factors: None without RoPE.
        attended: slots a token looks at.
    """

    places: Places
    query_factors: QueryFactors | None
    attended: int


@dataclass(frozen=True)
class Step:
    """One token: each layer writes and attends, and the bookkeeping of all layers is done at once after the last.

    Attributes:
        places: of the token, for the rows of all layers.
        rows: of all layers.
        attended: slots it looks at.
        mass: softmax weights of all layers, if the policy keeps a statistic. [R, G, S].
        mass_of_layer: the same, by layer. [N, G, S] each.
        kernel: that takes the token in; None: plain PyTorch, which needs what follows.
        query_factors: None without RoPE.
        used: slots that hold a token, by layer; None if all do. [N, 1, S] bool each.
        key_factors: RoPE of the cached keys, by layer; None where each layer computes its own. [N, S, P] each.
    """

    places: Places
    rows: Rows
    attended: int
    mass: Tensor | None
    mass_of_layer: Sequence[Tensor | None]
    kernel: StepKernel | None
    query_factors: QueryFactors | None
    used: Sequence[Tensor | None] = ()
    key_factors: Sequence[Tensor | None] = ()


Plan = Fill | Closed | CompiledWalk | PlainWalk | Step
