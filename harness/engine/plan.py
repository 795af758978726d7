"""Plans of blocks. A plan is made once per block, before the first layer, and used unchanged in all layers.

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
        ids: ids of the tokens. [B, T] int64.
    """

    steps: Tensor
    valid: Tensor | None
    tokens_before: int | None
    ids: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens in the block, T."""
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
    """Places of a block's tokens in every row of some slots, with one entry per token.

    Attributes:
        ranks: rank of the token, or the empty rank for an invalid token; None if only the device knows it. [R] int64 each.
        steps: index of the token in its stream. [R] int64 each.
        now: index of the token in its stream, for a policy's view. [L * B, 1, 1] int64 each.
        valid: whether the token counts; None if all tokens count. [L * B, 1, 1] bool each.
        evicts: whether the host knows that every stream must evict after the token.
        ragged: streams differ in length, so only the device knows which of them are full.
        ids: id of the token. [R] int64 each.
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
        ids: ids of the tokens. [B, T] int64.
    """

    tokens_before: int
    ids: Tensor


@dataclass(frozen=True)
class Closed:
    """Plan of a block whose visible tokens are known beforehand: banded attention in one pass.

    Attributes:
        form: closed form that computes the block.
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
        kernel: kernel that walks the block.
        query_factors: RoPE of the queries; None without RoPE, or if the kernel rotates.
        attended: number of slots that the kernel attends over.
        tokens_before: tokens before the block.
        ordered: the slots hold their tokens oldest first.
        block: block that is walked.
    """

    kernel: WalkKernel
    query_factors: QueryFactors | None
    attended: int
    tokens_before: int
    ordered: bool
    block: Block


@dataclass(frozen=True)
class Runs:
    """Plan of a block that is read in runs: consecutive tokens without an eviction, with one attention call per run.

    Attributes:
        lengths: lengths of the runs. Tokens are evicted after every run, except perhaps the last.
        places: places of the block's tokens, for the rows of one layer.
        attended: number of slots that a token attends over.
        updates: statistics see the attention of each token.
    """

    lengths: Sequence[int]
    places: Places
    attended: int
    updates: bool


@dataclass(frozen=True)
class PlainWalk:
    """Plan of a block that is walked token by token inside each layer, as the walk is defined.

    Attributes:
        places: places of the block's tokens, for the rows of one layer.
        query_factors: RoPE of each token's query, equal in all layers; None without RoPE, or if only the device knows ranks.
            [N, 1, P] each.
        attended: number of slots that a token attends over.
        kernel: step kernel that reads each token; None for plain PyTorch.
    """

    places: Places
    query_factors: Sequence[QueryFactors | None]
    attended: int
    kernel: StepKernel | None = None


@dataclass(frozen=True)
class Step:
    """Plan of a single token. Each layer writes and attends; after the last layer, bookkeeping is done for all layers at once.

    Attributes:
        places: places of the token, for the rows of all layers.
        rows: rows of all layers.
        attended: number of slots that the token attends over.
        observed: receives the parts of attention that statistics read, for all layers. [R, G, ...] each.
        observed_of_layer: views of `observed`, by layer. [N, G, ...] each.
        kernel: step kernel that reads the token; None for plain PyTorch, which needs the remaining fields.
        query_factors: RoPE of the queries, by layer; None without RoPE. [N, 1, P] each.
        used: slots that hold a token, by layer; None if all slots do. [N, 1, S] bool each.
        key_factors: RoPE that the stored keys need, by layer; None if they need none, or if each layer computes its own.
            [N, S, P] each.
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
