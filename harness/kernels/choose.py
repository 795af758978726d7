"""Choose the kernels for the layers of one `Slots`: C on CPUs, Triton on CUDA. Both modules list theirs in `KERNELS`."""

from __future__ import annotations

from types import ModuleType

from kvbench.harness.engine.kernel_interface import Kernels
from kvbench.harness.engine.slots import Slots
from kvbench.harness.kernels import cpu, cuda
from kvbench.policies import PositionMode

_MODULES: dict[str, ModuleType] = {"cpu": cpu, "cuda": cuda}  # by kind of device


def kernels_for(slots: Slots, mode: PositionMode, limit: int, longest: int | None, in_graphs: bool = False) -> Kernels:
    """Return the kernels for some layers. Arguments are those of `kvbench.harness.kernels.kernels_for`."""
    module = _MODULES.get(slots.device.type)
    if module is None:
        return Kernels(plain_because=f"no kernels for device '{slots.device.type}'")
    step_kind, release_kind, walk_kind = module.KERNELS
    walk, lost = walk_kind.from_slots(slots, mode, limit, longest, in_graphs), module.lost(slots, mode, limit)
    because = ""
    if walk is None and not lost:
        because = module.why_not_walked(slots) or "no kernel walks blocks of such layers in this dtype"
    step = step_kind.from_slots(slots, mode, limit, longest)
    return Kernels(step, release_kind.from_slots(slots), walk, lost, because)
