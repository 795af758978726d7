"""Measurement of memory at several points of a stream."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.engine.budgets import static_table
from kvbench.harness.engine.decoder import CacheConfig, Decoder
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.pool import PAGE, pages_for
from kvbench.harness.engine.rotary import Rotation
from kvbench.harness.engine.slots import BUCKET, LayerShape
from kvbench.harness.engine.stored import storage_bytes, tensors_in
from kvbench.harness.records.metrics import READ_AT_POINTS
from kvbench.harness.tasks.memory import MemoryMetrics, MemoryOptions
from kvbench.harness.tasks.task import Job
from kvbench.policies.window import Window

_RELATIVE_TOLERANCE = 0.02  # relative difference allowed between allocated and reported bytes
_TOLERANCE_BYTES = 2**18  # absolute difference allowed, for small tensors of a step; the larger tolerance applies
_MAX_GROWTH_BYTES = {"cpu": 2**23, "cuda": 2**20}  # growth of the peak allowed after the cache is full


def measure(options: MemoryOptions, job: Job) -> MemoryMetrics:
    """Read the stream, and measure memory at several points."""
    _warm_up(job.model)
    meter = _CudaMeter(job.model.devices) if job.model.device.type == "cuda" else _ProcessMeter()
    read = job.decoder(options.batch)
    curve, largest_tensor_bytes = [], 0
    vocabulary = job.model.hf.config.get_text_config().vocab_size
    generator, position, tokens_per_point = torch.Generator().manual_seed(0), 0, options.tokens / options.points
    for point in range(1, options.points + 1):
        started, first, end = time.perf_counter(), position, round(point * tokens_per_point)
        while position < end:
            shape = (options.batch, min(job.block, end - position))
            tokens = torch.randint(vocabulary, shape, generator=generator).to(job.model.device)
            read(tokens, keep=torch.tensor([shape[1] - 1], device=job.model.device))
            position += shape[1]
        meter.wait()
        largest_tensor_bytes = max(largest_tensor_bytes, tensor_bytes(read, job.model))
        curve.append(
            {
                "position": position,
                "peak_bytes": meter.peak(),
                "token_ms": 1e3 * (time.perf_counter() - started) / (position - first),
            }
        )
        job.progress(position, f"peak {curve[-1]['peak_bytes'] / 2**20:,.1f} MiB over weights")
    return _figures(options, job, read, meter, largest_tensor_bytes, curve)


def _figures(
    options: MemoryOptions, job: Job, read: Decoder, meter: _Meter, tensor_bytes: int, curve: list[dict[str, Any]]
) -> MemoryMetrics:
    capacity, reported = job.config.capacity, read.kv_bytes + read.state_bytes
    allocated = meter.allocated() if isinstance(meter, _CudaMeter) else tensor_bytes
    full = next((c for c in curve if c["position"] > (capacity or 0)), curve[-1])
    growth = curve[-1]["peak_bytes"] - full["peak_bytes"]
    flags = []
    if abs(allocated - reported) > max(_RELATIVE_TOLERANCE * reported, _TOLERANCE_BYTES):
        flags.append(f"the cache reports {reported:,} bytes, but {allocated:,} are allocated")
    is_ours = not isinstance(job.config.policy, Contestant)
    expected = _kv_bytes(job.model, job.config, options.tokens, options.batch) if is_ours else None
    if expected is not None and read.kv_bytes != expected:
        flags.append(f"its K/V takes {read.kv_bytes:,} bytes, but by the model's shapes {expected:,}")
    if capacity is not None and growth > _MAX_GROWTH_BYTES.get(job.model.device.type, 2**23):
        flags.append(f"the peak rose by {growth:,} bytes after the cache was full")
    return MemoryMetrics.from_json(
        {
            "peak_bytes": curve[-1]["peak_bytes"],
            "allocated_bytes": allocated,
            "kv_bytes": read.kv_bytes,
            "kv_held_bytes": read.held_bytes,
            "state_bytes": read.state_bytes,
            "expected_kv_bytes": expected,
            "growth_bytes": growth,
            "weight_bytes": _weight_bytes(job.model),
            "how": meter.how,
            "curve": curve,
            "flags": flags,
        }
    )


def _kv_bytes(model: Model, config: CacheConfig, tokens: int, streams: int) -> int:
    """Compute the bytes of the K and V slots of all streams after `tokens` tokens, from the layers' shapes and the budgets."""
    if not holds_kv(config.policy):
        return 0
    table, total = static_table(model, config, None), 0
    for layer, shape in enumerate(model.layers):
        kept = shape.kept(config.capacity)
        if kept is not None and shape.heads > 1 and config.policy.bind(kept).pool_floor(kept) is not None:
            total += _shared_bytes(model, config, shape, kept, tokens, streams)
            continue
        for head in range(shape.heads):
            kept = shape.kept(table[layer][head] if table else config.capacity)
            slots = -(-tokens // BUCKET) * BUCKET if kept is None else kept + config.every
            total += streams * shape.kv_bytes(slots, model.dtype, config.kv) // shape.heads
    return total


def _shared_bytes(model: Model, config: CacheConfig, shape: LayerShape, kept: int, tokens: int, streams: int) -> int:
    """Compute the bytes of the K and V slots of a layer whose heads share a budget.

    Slots come from a pool of pages. A coded cache has no pool: each head has slots for its largest possible share.
    """
    rows, each = streams * shape.heads, kept + config.every
    if config.kv is None:
        full = rows * each
        pages = pages_for(min(rows * tokens, full), rows, full, PAGE)
        return shape.kv_bytes(pages * PAGE, model.dtype) // shape.heads
    floor = config.policy.bind(kept).pool_floor(kept) or 0
    return streams * shape.kv_bytes(each + (shape.heads - 1) * (kept - floor), model.dtype, config.kv)


def _warm_up(model: Model) -> None:
    """Trigger one-time allocations of libraries, with a cache of one token."""
    read = decoder(model, CacheConfig(Window(), 1))
    for _ in range(3):
        read(torch.zeros(1, 1, dtype=torch.int64, device=model.device))


def _weight_bytes(model: Model) -> int:
    return sum(p.nbytes for p in {p.data_ptr(): p for p in model.hf.parameters()}.values())


class _Meter:
    """Meter of memory above the level at its creation."""

    how = ""

    def peak(self) -> int:
        """Return the largest use so far, in bytes above the start."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for the device."""


class _CudaMeter(_Meter):
    how = "the CUDA allocator's statistics"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        gc.collect()
        self.wait()
        self._before = sum(map(torch.cuda.memory_allocated, devices))
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> int:
        """Return the sum of the devices' peaks, an upper bound of the peak of their sum."""
        return sum(map(torch.cuda.max_memory_allocated, self._devices)) - self._before

    def allocated(self) -> int:
        """Return the current use, in bytes above the start."""
        gc.collect()
        self.wait()
        return sum(map(torch.cuda.memory_allocated, self._devices)) - self._before

    def wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


class _ProcessMeter(_Meter):
    def __init__(self) -> None:
        gc.collect()
        _give_back()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak to the current size
            self.how = "the process's peak resident size (VmHWM), above that with the model loaded and free memory given back"
            self._has_peak = True
        except OSError:
            self.how = f"the process's resident size (psutil), {READ_AT_POINTS}"
            self._has_peak = False
        self._peak = 0
        self._before = self._resident()

    def peak(self) -> int:
        self._peak = max(self._peak, self._resident() - self._before)
        return self._peak

    def _resident(self) -> int:
        if self._has_peak:
            line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert line
            return int(line[1]) * 1024
        import psutil

        return int(psutil.Process().memory_info().rss)


def _give_back() -> None:
    """Give memory that was freed while the model was loaded back to the operating system.

    Otherwise, a cache in such memory would appear to take no memory.
    """
    with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def tensor_bytes(decoder: Decoder, model: Model) -> int:
    """Return the bytes of all tensors that a decoder holds, each storage once, without views of the model's weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.hf.parameters()}
    held = tensors_in(decoder, (Model, Rotation))
    return storage_bytes(t for t in held if t.untyped_storage().data_ptr() not in weights)
