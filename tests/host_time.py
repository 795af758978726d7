"""What the host does to walk tokens on CUDA, counted without a GPU: calls of the driver, and time until each returns.

Triton compiles for sm_90 and binds every launch as it would there; a stand-in driver launches nothing. So what a launch costs in
the driver itself is not in the time: some 2 to 4 us for a kernel, some 5 to 10 for a graph of 48.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from factories import slots_for
from triton.backends.compiler import GPUTarget

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import LayerShape
from kvbench.harness.kernels import cuda
from kvbench.policies.h2o import H2O

TOKENS, CAPACITY, STREAMS = 1024, 2048, 1
SIZES = [(TOKENS, 128)] * 2  # of keys and of values


class Host(NamedTuple):
    """What walking a token in one layer takes of the host."""

    microseconds: float
    launches: float  # calls of the driver that launch kernels or a graph


class Driver:
    """Stands in for Triton's CUDA driver: loads and launches nothing, and counts."""

    def __init__(self) -> None:
        self.launches = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (1, 1, 0, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 * 2**10, "multiprocessor_count": 132},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.launches += 1

        return launch

    def replayable(self, launches: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """In place of a CUDA graph."""

        def replay() -> None:
            self.launches += 1

        return replay


@contextmanager
def stand_in() -> Iterator[Driver]:
    """Let Triton and graphs be launched by the stand-in."""
    driver = Driver()
    with (
        patch.object(triton.runtime.driver, "_active", driver),
        patch.object(cuda, "replayable", driver.replayable),
        patch.object(cuda, "_GRAPH_DEVICES", {"cpu"}),
    ):
        yield driver


def walked(in_graphs: bool, rounds: int = 5) -> Host:
    """Walk blocks under H2O in one layer of the 8B shape, with a full cache: the fastest of some rounds."""
    rotation = Rotation(torch.rand(64), torch.arange(128).view(2, -1).T.reshape(-1), 64)
    rotation.prepare(torch.bfloat16)
    shape, device = LayerShape(8, 4, 128, 128, rotation, None), torch.device("cpu")
    slots = slots_for(shape, CacheConfig(H2O(), CAPACITY), [0], 1, STREAMS, torch.bfloat16, device)
    query, key, value = (
        torch.zeros(STREAMS, 8, *size, dtype=torch.bfloat16) for size in ((4, TOKENS, 128), *[(TOKENS, 128)] * 2)
    )
    with stand_in() as driver:
        kernel = cuda.WalkKernel.from_slots(slots, "cache", 0, None, in_graphs)
        assert kernel is not None
        rows, seconds = Rows(slots, slots.num_slots, 0), []
        for _ in range(rounds + 1):  # the first compiles and captures
            launches, start = driver.launches, time.perf_counter()
            kernel(slots, rows, 0, query, key, value, 1.0, ordered=False, seen=2 * CAPACITY)
            seconds.append(time.perf_counter() - start)
    return Host(1e6 * min(seconds[1:]) / TOKENS, (driver.launches - launches) / TOKENS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(walked(in_graphs=True).microseconds)
