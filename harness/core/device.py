"""Properties of a device: name, free memory, clock, memory bandwidth and rate of multiplication; and references for times.

A reference is work of a fixed kind that is timed alongside a measurement. A busy or throttled machine slows both. The times of
two runs can be compared after each is divided by its reference. A reference of the same kind of work is best, because a busy
machine does not slow all work alike.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

_BUFFER_BYTES = {"cuda": 2**30, "cpu": 2**28}  # far larger than any cache
_MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}
_WARM_UP_RUNS = 2
_TIMED_COPIES, _TIMED_PRODUCTS = 3, 3
_REFERENCE_SIDE, _REFERENCE_BYTES = {"cuda": 2048, "cpu": 256}, {"cuda": 2**26, "cpu": 2**22}  # of a calibration step
_STEPS_PER_ROUND = 5
_ROUNDS_ALONE = 3
_WARM_UP_STEPS = 2
_MAX_ROUND_MS = 100.0  # but at least one step


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or device.type


def instructions(device: torch.device) -> str:
    """Return the compute capability or widest SIMD level, which affects rounding and speed. A CPU's name does not reveal it."""
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return torch.backends.cpu.get_cpu_capability()


def use_full_float32(device: torch.device) -> None:
    """Make a GPU multiply float32 in float32. Some images set variables that allow TF32, which has 10 bits of mantissa."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False


def allows_tf32(device: torch.device) -> bool | None:
    """Whether a GPU may multiply float32 in TF32; None on a CPU, which has no TF32."""
    if device.type != "cuda":
        return None
    return bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a piece of work, until the device has finished it."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


class Marks:
    """A clock that is marked between pieces of work. On CUDA it records events, so that marking does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark the end of one piece of work and the start of the next."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Wait for the device, and return the milliseconds between consecutive marks."""
        if self._device.type == "cuda":
            wait_for(self._device)
            return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the shortest time of a piece of work after a warm-up, in seconds."""
    for _ in range(_WARM_UP_RUNS):
        work()
    marks = Marks(device)
    marks.mark()
    for _ in range(repeats):
        work()
        marks.mark()
    return min(marks.milliseconds()) / 1e3


def bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth in bytes per second: the better of copying (reads and writes) and summing (reads)."""
    size = min(_BUFFER_BYTES.get(device.type, _BUFFER_BYTES["cpu"]), free_bytes(device) // 8)
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x)
    by_copying = 2 * size / _best_of_threads(lambda: y.copy_(x), device, _TIMED_COPIES)
    return max(by_copying, size / _best_of_threads(lambda: x.sum(), device, _TIMED_COPIES))


def multiply_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return floating-point operations per second in a product of large matrices.

    On a CPU the result is at least the rate of float32. A processor without 16-bit instructions may compute some products in
    float32, and large square products far more slowly.
    """
    side = _MATRIX_SIDE.get(device.type, _MATRIX_SIDE["cpu"])
    x = torch.rand(side, side, device=device, dtype=torch.float32)
    operands = [x.to(dtype)] if device.type == "cuda" or dtype == torch.float32 else [x.to(dtype), x]
    return 2 * side**3 / min(_best_of_threads(partial(torch.matmul, x, x), device, _TIMED_PRODUCTS) for x in operands)


def _best_of_threads(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the shortest time in seconds, with all threads or, on a CPU, with one thread.

    On a busy CPU, all threads wait for the slowest.
    """
    seconds, threads = best_seconds(work, device, repeats), torch.get_num_threads()
    if device.type == "cuda" or threads == 1:
        return seconds
    torch.set_num_threads(1)
    try:
        return min(seconds, best_seconds(work, device, repeats))
    finally:
        torch.set_num_threads(threads)


class Reference:
    """A piece of reference work and its times.

    Attributes:
        rounds: median milliseconds of each round.
    """

    def __init__(self, device: torch.device, work: Callable[[], object]) -> None:
        """Warm up.

        Args:
            work: runs one step of the reference work.
        """
        self.rounds: list[float] = []
        self._device, self._work = device, work
        last_ms = self._timed(_WARM_UP_STEPS)[-1]
        self._steps = max(1, min(_STEPS_PER_ROUND, int(_MAX_ROUND_MS / last_ms)))

    def time_round(self) -> None:
        """Time one round."""
        self.rounds.append(float(np.median(self._timed(self._steps))))

    def _timed(self, steps: int) -> list[float]:
        marks = Marks(self._device)
        marks.mark()
        for _ in range(steps):
            self._work()
            marks.mark()
        return marks.milliseconds()


def calibration_ms(device: torch.device) -> float:
    """Time a calibration step, a float32 product and a copy of fixed sizes. Return its milliseconds. Takes about 10 ms."""
    side = _REFERENCE_SIDE.get(device.type, _REFERENCE_SIDE["cpu"])
    factor = torch.ones(side, side, device=device)
    product = torch.empty_like(factor)
    source = torch.ones(_REFERENCE_BYTES.get(device.type, _REFERENCE_BYTES["cpu"]) // 4, device=device)
    target = torch.empty_like(source)

    def step() -> None:
        torch.mm(factor, factor, out=product)
        target.copy_(source)

    reference = Reference(device, step)
    for _ in range(_ROUNDS_ALONE):
        reference.time_round()
    return round(float(np.median(reference.rounds)), 5)
