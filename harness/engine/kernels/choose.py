"""Which kernels serve the layers of one `Slots`: those in C on CPUs, those in Triton on CUDA; both offer the same classes."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from kvbench.harness.engine.kernels import cpu, cuda
from kvbench.harness.engine.slots import Slots
from kvbench.policies import PositionMode

_OF_DEVICE: dict[str, ModuleType] = {"cpu": cpu, "cuda": cuda}


StepKernel = cpu.StepKernel | cuda.StepKernel  # a token's attention
ReleaseKernel = cpu.ReleaseKernel | cuda.ReleaseKernel  # the bookkeeping after it
WalkKernel = cpu.WalkKernel | cuda.WalkKernel  # a block through one layer


class Kernels(NamedTuple):
    """The kernels that serve some layers; None where the plain code is used."""

    step: StepKernel | None = None
    release: ReleaseKernel | None = None
    walk: WalkKernel | None = None
    lost: str = ""  # why one is missing that could be there: no compiler, a library that can't be loaded
    plain_because: str = ""  # why no kernel can walk blocks of these layers under this policy


def kernels_for(slots: Slots, mode: PositionMode, limit: int, longest: int | None) -> Kernels:
    """The kernels of a device.

    Args:
        slots: of the layers.
        mode: where RoPE puts a cached token.
        limit: the largest distance of mode `clamped`, in tokens.
        longest: bounds the angles; the number of slots when None.
    """
    of = _OF_DEVICE.get(slots.tensors.keys.device.type)
    if of is None:
        return Kernels(plain_because=f"no kernels for device '{slots.tensors.keys.device.type}'")
    walk, lost = of.WalkKernel.of(slots, mode, limit, longest), of.lost(slots, mode, limit)
    because = ""
    if walk is None and not lost:
        because = of.why_untraced(slots.policy) or "no kernel walks blocks of such layers in this dtype"
    return Kernels(of.StepKernel.of(slots, mode, limit, longest), of.ReleaseKernel.of(slots), walk, lost, because)
