"""The engine's interface to the optional package `kvbench.harness.kernels`.

No other module of the engine imports that package. If it can't be imported, every function here returns a value that makes the
engine use its own PyTorch code, and the reason is recorded with the cell.

Axis letters: B streams, H KV heads, N = B * H, R rows of all layers, G query heads of a KV head, T tokens, S slots attended,
D key dim, Dv value dim, V vocabulary, k extra axes of a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvbench.harness.engine.closed_form import ClosedForm
    from kvbench.harness.engine.slot_rows import Rows
    from kvbench.harness.engine.slots import Slots
    from kvbench.policies import Policy, PositionMode, Statistic

DecodeStep = Callable[["Tensor"], "Tensor"]  # tokens [B, 1] -> logits [B, 1, V]


class StepKernel(Protocol):
    """Writes one token of each stream into its slot and attends, in one layer.

    Attributes:
        gives_logits: the kernel can return logits.
    """

    gives_logits: bool

    def __call__(
        self,
        slots: Slots,
        rows: Rows,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        mass: Tensor | None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Read a token of each stream. Its rank and position are already in its slot.

        Args:
            query: unrotated, dims in the model's order. [B, H * G, 1, D].
            key: unrotated, dims in the model's order. [B, H, 1, D].
            value: [B, H, 1, Dv].
            mass: receives the softmax weights; None if they are not needed. [N, G, S].
            logits: receives the logits, -inf in empty slots; None if they are not needed. [N, G, S].

        Returns:
            [B, H * G, 1, Dv].
        """


class ReleaseKernel(Protocol):
    """Evicts after a step, for one layer or for all layers of one `Slots`.

    Attributes:
        updates: the kernel also updates the statistics; otherwise they are updated before.
    """

    updates: bool

    def __call__(self, slots: Slots, rows: Rows, mass: Tensor | None, step: Tensor, full: bool) -> None:
        """Choose the evicted tokens and the next token's slot.

        Args:
            slots: the first values of the token's statistics are already in its slot.
            mass: softmax weights, if a statistic needs them. [R, G, S].
            step: step of the token. [R] int64.
            full: every stream holds `capacity + every` tokens and evicts `every` of them; if False, no stream evicts.
        """


class WalkKernel(Protocol):
    """Walks a block token by token inside one layer.

    Attributes:
        leaves_ordered: after the walk, the slots hold their tokens oldest first.
        rotates: the kernel takes queries and keys as the model computes them; otherwise queries are rotated and scaled before.
        in_graphs: the kernel replays its launches as CUDA graphs.
    """

    leaves_ordered: bool
    rotates: bool
    in_graphs: bool

    def __call__(
        self,
        slots: Slots,
        rows: Rows,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        ordered: bool,
        tokens_before: int,
        written: Mapping[Statistic, Tensor] | None = None,
        unrotated: Tensor | None = None,
    ) -> Tensor:
        """Walk a block of streams of equal length.

        Args:
            layer: its index in the model.
            query: unrotated, dims in the model's order, if the kernel `rotates`; otherwise rotated and scaled, with paired dims
                side by side. [B, H, G, T, D].
            keys: unrotated, dims in the same order as the query. [B, H, T, D].
            values: [B, H, T, Dv].
            scaling: scaling of the scores, used if the kernel `rotates`.
            ordered: the slots hold their tokens oldest first.
            tokens_before: tokens before the block.
            written: first values, for statistics that compute them. [N, T, *k] each.
            unrotated: the unrotated query, if a statistic sees it, and the kernel does not rotate. [B, H, G, T, D].

        Returns:
            [B, H, G, T, Dv], dtype of the values.
        """


class Kernels(NamedTuple):
    """Kernels for the layers of one `Slots`; None where PyTorch code is used.

    Attributes:
        step: attention of single tokens.
        release: eviction after single tokens.
        walk: blocks of several tokens.
        lost: reason that an existing kernel can't be used, such as a missing compiler; empty if there is none.
        plain_because: reason that no kernel walks blocks of these layers under this policy; empty if a kernel does.
    """

    step: StepKernel | None = None
    release: ReleaseKernel | None = None
    walk: WalkKernel | None = None
    lost: str = ""
    plain_because: str = ""


class StepGraphs(Protocol):
    """Decode steps of one decoder, captured as CUDA graphs.

    Attributes:
        refused: reason that steps run eagerly despite the graphs; empty if there is none.
        replayed: number of steps replayed.
    """

    refused: str
    replayed: int

    def fresh(self, after: int | None = None) -> Self:
        """Return graphs for another decoder, with nothing captured. after: steps before the first capture; None keeps it."""

    def __call__(
        self,
        slots: Hashable,
        phase: Hashable,
        alive: Any,
        step: DecodeStep,
        tokens: Tensor,
        around: Callable[[], AbstractContextManager[None]] = ...,
    ) -> tuple[Tensor, bool]:
        """Read a token of each stream.

        Args:
            slots: identifies the tensors that the step reads and writes. Once they change, all graphs are dropped.
            phase: identifies all other decisions of the host about the step.
            alive: objects that the graph reads from, kept alive with it.
            step: the eager step.
            tokens: [B, 1] int64.
            around: entered around the dry run and the capture.

        Returns:
            Logits [B, 1, V], and whether they come from a replay: then `step` was not called.
        """


class FusedStepError(RuntimeError):
    """This model's step can't be compiled; the message says why."""


def _package() -> tuple[ModuleType | None, str]:
    """Import `kvbench.harness.kernels`; return None and the reason if it can't be imported."""
    try:
        from kvbench.harness import kernels
    except ImportError as error:
        return None, f"there are no kernels: {error}"
    return kernels, ""


def kernels_for(slots: Slots, mode: PositionMode, limit: int, longest: int | None, in_graphs: bool = False) -> Kernels:
    """Return the kernels for the layers of one `Slots` under their policy.

    Args:
        longest: bound of the angles; the number of slots when None.
        in_graphs: let the kernel that walks blocks replay its launches as CUDA graphs.
    """
    package, missing = _package()
    if package is None:
        return Kernels(lost=missing)
    kernels: Kernels = package.kernels_for(slots, mode, limit, longest, in_graphs)
    return kernels


def flex_form(slots: Slots, mode: PositionMode, limit: int, rope_length: int, band: tuple[int, int]) -> ClosedForm | None:
    """Return a closed form that uses FlexAttention where possible; None without kernels. Arguments are those of `ClosedForm`."""
    package, _ = _package()
    form: ClosedForm | None = None if package is None else package.flex_form(slots, mode, limit, rope_length, band)
    return form


def step_graphs() -> StepGraphs | None:
    """Return graphs for a new decoder on CUDA; None without kernels."""
    package, _ = _package()
    graphs: StepGraphs | None = None if package is None else package.step_graphs()
    return graphs


def capture_failure() -> str:
    """Return the reason that this process can't capture CUDA graphs any more; empty if it can."""
    package, _ = _package()
    return "" if package is None else str(package.capture_failure())


def fused_logits(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return logits of single tokens at position 0, from a model compiled as a whole. [B, 1] int64 -> [B, 1, V].

    Raises:
        FusedStepError: the model can't be compiled, or there are no kernels.
    """
    package, missing = _package()
    if package is None:
        raise FusedStepError(missing)
    logits: Tensor = package.fused_logits(hf, tokens)
    return logits


def why_not_compiled(policy: Policy) -> str:
    """Return the reason that a bound policy has no compiled walk on this CPU; empty if it has one."""
    package, missing = _package()
    return missing if package is None else str(package.why_not_compiled(policy))
