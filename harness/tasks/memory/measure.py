"""Reading a stream, and looking at the memory on the way."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvbench.harness.engine.decoder import CacheConfig, Decoder
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.slots import BUCKET
from kvbench.harness.tasks.memory.schema import MemoryMetrics, MemoryOptions
from kvbench.harness.tasks.task import Job
from kvbench.policies.window import Window

_AGREE = 0.02  # of what is reported: how far what is found may be from it,
_AGREE_BYTES = 2**18  # or this much, for the small tensors that a step is put together from
_FLAT_BYTES = {"cpu": 2**23, "cuda": 2**20}  # by which the peak of a full cache may still rise


def measure(options: MemoryOptions, job: Job) -> MemoryMetrics:
    """Read the stream, and look at the memory on the way."""
    _warm_up(job.model)
    meter = _CudaMeter(job.model.device) if job.model.device.type == "cuda" else _ProcessMeter()
    read = job.decoder(options.batch)
    curve, found = [], 0
    vocabulary = job.model.hf.config.get_text_config().vocab_size
    drawn, position, part = torch.Generator().manual_seed(0), 0, options.tokens / options.points
    for point in range(1, options.points + 1):
        started, first, end = time.perf_counter(), position, round(point * part)
        while position < end:
            shape = (options.batch, min(job.block, end - position))
            tokens = torch.randint(vocabulary, shape, generator=drawn).to(job.model.device)
            read(tokens, keep=torch.tensor([shape[1] - 1], device=job.model.device))
            position += shape[1]
        meter.wait()
        found = max(found, tensor_bytes(read))
        curve.append({
            "position": position, "peak_bytes": meter.peak(),
            "token_ms": 1e3 * (time.perf_counter() - started) / (position - first),
        })  # fmt: skip
        job.progress(position, f"peak {curve[-1]['peak_bytes'] / 2**20:,.1f} MiB over weights")
    return _figures(options, job, read, meter, found, curve)


def _figures(
    options: MemoryOptions, job: Job, read: Decoder, meter: _Meter, found: int, curve: list[dict[str, Any]]
) -> MemoryMetrics:
    """All of it, and what is wrong with it."""
    capacity, reported = job.config.capacity, read.kv_bytes + read.state_bytes
    allocated = meter.allocated() if isinstance(meter, _CudaMeter) else found
    filled = next((c for c in curve if c["position"] > (capacity or 0)), curve[-1])
    growth = curve[-1]["peak_bytes"] - filled["peak_bytes"]
    flags = []
    if abs(allocated - reported) > max(_AGREE * reported, _AGREE_BYTES):
        flags.append(f"reports {reported:,} bytes, and {allocated:,} are allocated")
    slots = options.tokens if capacity is None else capacity + 1
    slots = -(-slots // BUCKET) * BUCKET if capacity is None else slots
    expected = job.model.kv_bytes(slots - 1, options.batch) if job.config.policy.caches else 0
    if read.kv_bytes != expected:
        flags.append(f"its K/V takes {read.kv_bytes:,} bytes, and should take {expected:,}")
    if capacity is not None and growth > _FLAT_BYTES.get(job.model.device.type, 2**23):
        flags.append(f"its peak rose by {growth:,} bytes after the cache had filled")
    return MemoryMetrics.from_json({
        "peak_bytes": curve[-1]["peak_bytes"], "allocated_bytes": allocated, "kv_bytes": read.kv_bytes,
        "state_bytes": read.state_bytes, "expected_kv_bytes": expected, "growth_bytes": growth,
        "weight_bytes": _weights(job.model), "how": meter.how, "curve": curve, "flags": flags,
    })  # fmt: skip


def _warm_up(model: Model) -> None:
    """Let libraries make what they make once, with as little of our own as possible."""
    read = decoder(model, CacheConfig(Window(), 1))
    for _ in range(3):
        read(torch.zeros(1, 1, dtype=torch.int64, device=model.device))


def _weights(model: Model) -> int:
    return sum(p.nbytes for p in {p.data_ptr(): p for p in model.hf.parameters()}.values())


class _Meter:
    """Memory taken since now."""

    how = ""

    def peak(self) -> int:
        """The most so far, in bytes over what there was at the start."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until the device is done."""


class _CudaMeter(_Meter):
    how = "the CUDA allocator's statistics"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        torch.cuda.synchronize(device)
        self._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def allocated(self) -> int:
        """What is held now, in bytes over what there was at the start."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device) - self._before

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


class _ProcessMeter(_Meter):
    def __init__(self) -> None:
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is resident now
            self.how = "the process's peak resident size (VmHWM), reset once the model was loaded"
            self._kind = "VmHWM"
        except OSError:
            self.how = "the process's resident size (psutil), read at every point"
            self._kind = ""
        self._most = 0
        self._before = self._resident()

    def peak(self) -> int:
        self._most = max(self._most, self._resident() - self._before)
        return self._most

    def _resident(self) -> int:
        if self._kind:
            found = re.search(rf"{self._kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert found
            return int(found[1]) * 1024
        import psutil

        return int(psutil.Process().memory_info().rss)


def tensor_bytes(decoder: Decoder) -> int:
    """Bytes of all tensors that a decoder holds, whatever it says of itself: each storage once, the model's left out."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(decoder, set())}
    return sum(storages.values())


def _tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(thing) in seen or isinstance(thing, (Model, Rotation)):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    if isinstance(thing, dict):
        parts: list[Any] = [*thing.values()]
    elif isinstance(thing, (list, tuple, set)):
        parts = [*thing]
    else:
        parts = [*vars(thing).values()] if hasattr(thing, "__dict__") and not isinstance(thing, type) else []
    for part in parts:
        yield from _tensors(part, seen)
