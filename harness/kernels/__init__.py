"""Kernels in C, Triton and CUDA, CUDA graphs, and the tracer that turns a policy into kernel code.

The engine works without this package. It calls only the functions below, through `engine/kernel_interface.py`. Each function
imports its module when it is called, so that CPUs never import Triton, and `bench list` imports no model.

Axis letters: B streams, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvbench.harness.engine.closed_form import ClosedForm
    from kvbench.harness.engine.kernel_interface import Kernels, StepGraphs
    from kvbench.harness.engine.slots import Slots
    from kvbench.policies import Policy, PositionMode


def kernels_for(slots: Slots, mode: PositionMode, limit: int, longest: int | None, in_graphs: bool = False) -> Kernels:
    """Return the kernels for the layers of one `Slots` under their policy: C on CPUs, Triton on CUDA.

    Arguments are those of `kernel_interface.kernels_for`. Kernels that can't be traced or built are None, with the reason.
    """
    from kvbench.harness.kernels import choose

    return choose.kernels_for(slots, mode, limit, longest, in_graphs)


def flex_form(slots: Slots, mode: PositionMode, limit: int, rope_length: int, band: tuple[int, int]) -> ClosedForm:
    """Return a closed form that computes blocks of whole tiles by FlexAttention on CUDA, and other blocks by PyTorch code.

    Arguments are those of `ClosedForm`.
    """
    from kvbench.harness.kernels.flex_blocks import FlexForm

    return FlexForm(slots, mode, limit, rope_length, band)


def step_graphs() -> StepGraphs:
    """Return graphs for a new decoder. A capture that fails later raises nothing."""
    from kvbench.harness.kernels.captured import CapturedSteps

    return CapturedSteps()


def capture_failure() -> str:
    """Return the message of the first CUDA graph capture that failed in this process; empty if no capture failed."""
    from kvbench.harness.kernels.captured import PROCESS

    return PROCESS.failed


def fused_logits(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Compute logits of single tokens at position 0 by a compiled model. The first call for each B compiles it.

    Args:
        tokens: [B, 1] int64.

    Returns:
        [B, 1, V], the model's dtype.

    Raises:
        FusedStepError: the model can't be compiled as a whole.
    """
    from kvbench.harness.kernels import fused

    return fused.fused_logits(hf, tokens)


def why_not_compiled(policy: Policy) -> str:
    """Return the reason that a bound policy has no compiled walk on this CPU, such as a missing compiler; empty if it has one."""
    from kvbench.harness.kernels import compiler

    return compiler.why_not(policy)
