"""Chooses the kernels for the layers of one `Slots`: C on CPUs, Triton on CUDA. Both have the same classes."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from kvbench.harness.engine.slots import Slots
from kvbench.harness.kernels import cpu, cuda
from kvbench.harness.kernels.cpu_compete import CompeteKernel
from kvbench.policies import PositionMode

_MODULES: dict[str, ModuleType] = {"cpu": cpu, "cuda": cuda}  # by kind of device


StepKernel = cpu.StepKernel | cuda.StepKernel  # a token's attention
ReleaseKernel = cpu.ReleaseKernel | cuda.ReleaseKernel | CompeteKernel  # the bookkeeping after it
WalkKernel = cpu.WalkKernel | cuda.WalkKernel  # a block through one layer


class Kernels(NamedTuple):
    """The kernels that serve some layers; None where the plain code is used."""

    step: StepKernel | None = None
    release: ReleaseKernel | None = None
    walk: WalkKernel | None = None
    lost: str = ""  # why a kernel that exists can't be used: no compiler, a library that can't be loaded
    plain_because: str = ""  # why there is no kernel to walk blocks of these layers under this policy


def kernels_for(slots: Slots, mode: PositionMode, limit: int, longest: int | None, in_graphs: bool = False) -> Kernels:
    """The kernels for some layers under their policy.

    Args:
        mode: where RoPE puts a cached token.
        limit: largest distance in mode `clamped`, in tokens.
        longest: bound of the angles; the number of slots when None.
        in_graphs: let the kernel that walks blocks replay its launches as CUDA graphs.
    """
    module = _MODULES.get(slots.device.type)
    if module is None:
        return Kernels(plain_because=f"no kernels for device '{slots.device.type}'")
    walk, lost = module.WalkKernel.from_slots(slots, mode, limit, longest, in_graphs), module.lost(slots, mode, limit)
    because = ""
    if walk is None and not lost:
        because = module.why_untraced(slots.policy) or module.why_unserved(slots)
        because = because or "no kernel walks blocks of such layers in this dtype"
    step = module.StepKernel.from_slots(slots, mode, limit, longest)
    release = module.ReleaseKernel.from_slots(slots)
    if release is None and slots.device.type == "cpu":
        release = CompeteKernel.from_slots(slots)
    return Kernels(step, release, walk, lost, because)
