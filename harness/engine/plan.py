"""A block's plan: decided once, when the block comes, and then passed through the layers unchanged.

Axis letters: L layers, B streams, H KV heads, N = B * H, R = L * N, G query heads of a KV head, S slots, T tokens, P pairs of
dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.harness.engine.closed_form import ClosedForm
from kvbench.harness.engine.kernel_interface import StepKernel, WalkKernel
from kvbench.harness.engine.rotary import QueryFactors
from kvbench.harness.engine.slot_rows import Rows
from kvbench.policies import Seen


@dataclass(frozen=True)
class Block:
    """A block of tokens, placed in their streams.

    Attributes:
        steps: each token's index in its stream. [B, T] int64.
        valid: tokens that count; all when None. [B, T] bool.
        tokens_before: tokens of each stream before the block; None when streams differ in length.
        ids: of the tokens. [B, T] int64.
    """

    steps: Tensor
    valid: Tensor | None
    tokens_before: int | None
    ids: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.steps.shape[1]

    @property
    def end(self) -> int | None:
        """Tokens of each stream up to the end of the block; None when streams differ in length."""
        return None if self.tokens_before is None else self.tokens_before + self.tokens

    def on(self, device: torch.device) -> Block:
        """Return the block with its tensors on a device."""
        if self.steps.device == device:
            return self
        valid = None if self.valid is None else self.valid.to(device)
        return Block(self.steps.to(device), valid, self.tokens_before, self.ids.to(device))


@dataclass(frozen=True)
class Places:
    """Places of a block's tokens in every row of the slots it is walked in: one entry per token.

    Attributes:
        ranks: rank of the token, or that of an empty slot if it does not count; None where only the device knows. [R] int64 each.
        steps: its index in its stream. [R] int64 each.
        now: the same for a policy's view. [L * B, 1, 1] int64 each.
        valid: whether it counts; None if all do. [L * B, 1, 1] bool each.
        evicts: whether, as far as the host knows, every stream must evict after it.
        ragged: streams differ in length, so only the device knows which of them are full.
        ids: of the token. [R] int64 each.
    """

    ranks: Sequence[Tensor | None]
    steps: Sequence[Tensor]
    now: Sequence[Tensor]
    valid: Sequence[Tensor | None]
    evicts: Sequence[bool]
    ragged: bool
    ids: Sequence[Tensor]


@dataclass(frozen=True)
class Fill:
    """Plan of a block during which nothing is evicted: causal attention in one pass, with rank = position = slot.

    Attributes:
        tokens_before: tokens before the block.
        ids: of its tokens. [B, T] int64.
    """

    tokens_before: int
    ids: Tensor


@dataclass(frozen=True)
class Closed:
    """Plan of a block whose visible tokens are known beforehand: banded attention in one pass.

    Attributes:
        form: that computes it.
        tokens_before: tokens before the block.
        ordered: the slots hold their tokens oldest first.
    """

    form: ClosedForm
    tokens_before: int
    ordered: bool


@dataclass(frozen=True)
class CompiledWalk:
    """Plan of a block that a kernel walks inside each layer.

    Attributes:
        kernel: that walks.
        query_factors: None without RoPE, and where the kernel rotates.
        attended: slots it looks at.
        tokens_before: tokens before the block.
        ordered: the slots hold their tokens oldest first.
        block: that is walked.
    """

    kernel: WalkKernel
    query_factors: QueryFactors | None
    attended: int
    tokens_before: int
    ordered: bool
    block: Block


@dataclass(frozen=True)
class Runs:
    """The block is read in runs of tokens during which nothing is evicted: each is one attention call.

    Attributes:
        lengths: of the runs. Tokens are evicted after each but perhaps the last.
        places: of its tokens, for the rows of one layer.
        attended: slots a token looks at.
        updates: statistics see the attention of each token.
    """

    lengths: Sequence[int]
    places: Places
    attended: int
    updates: bool


@dataclass(frozen=True)
class PlainWalk:
    """The definition: the block is walked token by token inside each layer.

    Attributes:
        places: of its tokens, for the rows of one layer.
        query_factors: RoPE of each token's query, alike in every layer; None without RoPE, and where only the device knows ranks.
            [N, 1, P] each.
        attended: slots a token looks at.
        kernel: of a step, that reads each token; None: plain code does.
    """

    places: Places
    query_factors: Sequence[QueryFactors | None]
    attended: int
    kernel: StepKernel | None = None


@dataclass(frozen=True)
class Step:
    """Plan of a single token: each layer writes and attends; after the last, the bookkeeping of all layers is done at once.

    Attributes:
        places: of the token, for the rows of all layers.
        rows: of all layers.
        attended: slots it looks at.
        observed: what statistics read of attention, of all layers. [R, G, ...] each.
        observed_of_layer: the same, by layer. [N, G, ...] each.
        kernel: that takes the token in; None: plain PyTorch, which needs what follows.
        query_factors: RoPE of the queries, by layer; None without RoPE. [N, 1, P] each.
        used: slots that hold a token, by layer; None if all do. [N, 1, S] bool each.
        key_factors: RoPE that cached keys need, by layer; None if none, or where each layer computes its own. [N, S, P] each.
    """

    places: Places
    rows: Rows
    attended: int
    observed: Mapping[Seen, Tensor]
    observed_of_layer: Sequence[Mapping[Seen, Tensor]]
    kernel: StepKernel | None
    query_factors: Sequence[QueryFactors | None] = ()
    used: Sequence[Tensor | None] = ()
    key_factors: Sequence[Tensor | None] = ()


Plan = Fill | Closed | CompiledWalk | Runs | PlainWalk | Step
