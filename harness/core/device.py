"""What runs: its name, its clock, and how fast it moves bytes and multiplies."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

_BYTES = {"cuda": 2**30, "cpu": 2**28}  # of the buffer that bandwidth is measured on: far beyond any cache
_SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices that are multiplied


def device_name(device: torch.device) -> str:
    """What runs, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or device.type


def instructions(device: torch.device) -> str:
    """What it computes with: sums are rounded, and steps take, as the widest instructions allow; names of CPUs don't tell."""
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return torch.backends.cpu.get_cpu_capability()


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def wait_for(device: torch.device) -> None:
    """Until it has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """A clock that is marked between pieces of work: events on CUDA, so that nothing waits; `perf_counter` elsewhere."""

    def __init__(self, device: torch.device) -> None:
        """For work on this device."""
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """One piece of work ends, the next begins."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between each two marks, once the device is done with all of it."""
        if self._device.type == "cuda":
            wait_for(self._device)
            return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The shortest time of a piece of work, warmed up."""
    for _ in range(3):
        work()
    marks = Marks(device)
    marks.mark()
    for _ in range(repeats):
        work()
        marks.mark()
    return min(marks.milliseconds()) / 1e3


def bandwidth(device: torch.device) -> float:
    """Bytes a second between the device and its memory: the better of copying (read and written) and summing (read)."""
    size = min(_BYTES.get(device.type, 2**28), free_bytes(device) // 8)
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x)
    copied = 2 * size / best_seconds(lambda: y.copy_(x), device, 10)
    return max(copied, size / best_seconds(lambda: x.sum(), device, 10))


def multiply_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second in a product of large matrices."""
    side = _SIDE.get(device.type, 1024)
    x = torch.rand(side, side, device=device, dtype=torch.float32).to(dtype)
    return 2 * side**3 / best_seconds(lambda: x @ x, device, 5)
