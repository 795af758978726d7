"""What latency and memory count: a clock and an allocator whose every step is known, and the figures that follow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import model_of

from kvbench.harness.core import device
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER
from kvbench.harness.tasks.latency import Latency, LatencyOptions
from kvbench.harness.tasks.latency import measure as latency
from kvbench.harness.tasks.memory import Memory, MemoryOptions
from kvbench.harness.tasks.memory import measure as memory
from kvbench.harness.tasks.task import Job, RandomTokens
from kvbench.policies.dense import Dense
from kvbench.policies.window import Window

SHORT = LatencyOptions(tokens=300, prompt=20, steps=2, rounds=6, sittings=2, most_sittings=2, precision=0.9)
PROMPT_MS = [1000, 10, 20, 30, 40, 50, 60, 70]  # seven in the first sitting, of which the first warms up, and one in the second
STREAM_MS = 7777  # a block of the stream between the prompt and a timed point
WARM_UP_STEPS, WARM_UP_MS, BOOKKEEPING_MS = 3, 40, 8
# Milliseconds of a round's two steps: after 256 tokens, at the end of the stream, and there in the second sitting.
ROUNDS_MS = [[(low + n, high + n) for n in range(6)] for low, high in ((2, 4), (10, 20), (12, 26))]
FORWARD_MS = [20, 20, *[99] * 30, *(n + ms for n in range(12) for ms in (1, 2, 3, 4, 100))]  # five steps a round


class Clock:
    """Seconds that pass only when they are spent."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bookkeeping_ms = 0.0  # of each choice of a victim from now on

    def perf_counter(self) -> float:
        return self.now

    def spend(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3


class Steps:
    """Spends the time of a cell's calls in their order, whichever decoder is called."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.prompts, self.stretch, self.singles = clock, iter(PROMPT_MS), -1, 0

    def open(self, *args):
        steps = self

        class Timed(CachedDecoder):
            fresh = True

            def __call__(self, tokens, valid=None, keep=None):
                steps.spend(tokens.shape[1], self.fresh)
                self.fresh = False
                return super().__call__(tokens, valid, keep)

        self.singles = 0
        return Timed(*args)

    def spend(self, tokens: int, fresh: bool) -> None:
        if tokens > 1:
            self.clock.spend(next(self.prompts) if fresh else STREAM_MS)
            self.singles = 0
            return
        self.stretch += self.singles == 0
        place, self.singles = self.singles - WARM_UP_STEPS, self.singles + 1
        timed = [ms for pair in ROUNDS_MS[self.stretch] for ms in pair]
        after = place >= len(timed)
        self.clock.bookkeeping_ms = 1.0 if after else 0.0
        self.clock.spend(WARM_UP_MS if place < 0 else BOOKKEEPING_MS if after else timed[place])


def test_every_timed_step_counts_and_nothing_else_does(monkeypatch, tmp_path):
    clock, forward, choices = Clock(), iter(FORWARD_MS), []

    class Costly(Window):
        def importance(self, view):
            clock.spend(clock.bookkeeping_ms)
            choices.append(clock.bookkeeping_ms)
            return super().importance(view)

    monkeypatch.setattr(device, "time", clock)
    monkeypatch.setattr(latency, "_rates", lambda model: {"bandwidth": 1e15, "multiply_rate": 1e15})
    monkeypatch.setattr(latency, "RecomputeDecoder", lambda *_: lambda tokens: clock.spend(next(forward)))
    jobs = [
        Job(model_of("llama"), config, RandomTokens(1), 64, EAGER, tmp_path / f"{n}", lambda *_: None, open=Steps(clock).open)
        for n, config in enumerate([CacheConfig(Dense()), CacheConfig(Costly(), 16)])
    ]
    results = dict(Latency.run_together(SHORT, jobs))
    for number, metrics in results.items():
        timed = np.load(tmp_path / f"{number}")
        np.testing.assert_allclose(timed, [*ROUNDS_MS[1], *ROUNDS_MS[2]], rtol=1e-5)
        assert metrics.rounds_ms == [15, 16, 17, 18, 19, 20, 19, 20, 21, 22, 23, 24]
        assert metrics.step_ms == pytest.approx(19.5)
        assert metrics.error == pytest.approx((22 - 17) / 2 / 19.5)  # of twelve medians the third and the tenth
        assert (metrics.steps, metrics.sittings, metrics.settled, metrics.position) == (24, 2, True, 300)
        assert metrics.percentiles_ms == pytest.approx({"p50": 18.5, "p90": 28.7})
        assert metrics.largest_ms == pytest.approx((25 + 31) / 2)
        assert metrics.spread_ms == pytest.approx([15, 24])
        assert metrics.tokens_per_second == pytest.approx(1e3 / 19.5)
        assert (metrics.first_token_ms, metrics.first_token_error) == pytest.approx((40, (70 - 10) / 2 / 40))
        curve = [(point.position, round(point.step_ms, 9), point.steps) for point in metrics.curve]
        assert curve == [(256, 5.5, 12), (300, 19.5, 24)]
        assert metrics.forward_ms == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
        assert metrics.over_roofline == pytest.approx(19.5 / metrics.roofline.ms)
    choosing = sum(choices)
    assert choosing >= 16, "at least one choice in each step"
    assert results[0].bookkeeping_share == 0
    assert results[1].bookkeeping_share == pytest.approx(choosing / (16 * BOOKKEEPING_MS + choosing))


MIB = 2**20
# MiB that a call of the decoder leaves allocated, and what it allocates above that for a moment. Two calls to a point.
CALLS = [(1, 1), (0, 1), (4, 4), (-3, 0), (0, 3), (0, 1), (1, 1), (0, 9)]


class Heap:
    """Memory of a process and of a device whose every allocation is known. A model has been loaded."""

    def __init__(self) -> None:
        self.now, self.peak = 100 * MIB, 500 * MIB

    def reset(self, *_) -> None:
        self.peak = self.now

    def allocate(self, kept: int, momentary: int) -> None:
        self.now += kept * MIB
        self.peak = max(self.peak, self.now + momentary * MIB)


def process_meter(monkeypatch, heap: Heap, has_peak: bool) -> None:
    """The files of /proc, or psutil where the system has none."""

    def write_text(text):
        if not has_peak:
            raise OSError
        heap.reset()

    def path(name):
        status = f"VmPeak:\t 999999999 kB\nVmHWM:\t {heap.peak // 1024} kB\nVmRSS:\t {heap.now // 1024} kB\n"
        return SimpleNamespace(write_text=write_text, read_text=lambda: status)

    monkeypatch.setattr(memory, "Path", path)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=heap.now)))


def cuda_meter(monkeypatch, heap: Heap) -> None:
    """The allocators of two devices, each with half of the memory."""
    devices = [torch.device("cuda", n) for n in range(2)]
    resets = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: heap.now // 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: heap.peak // 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: resets.append(device) or heap.reset())
    monkeypatch.setattr(memory, "_ProcessMeter", lambda: memory._CudaMeter(devices))


@pytest.mark.parametrize(
    ("meter", "peaks"), [("VmHWM", [2, 9, 9, 12]), ("psutil", [1, 2, 2, 3]), ("cuda", [2, 9, 9, 12])], ids=lambda x: str(x)
)
@pytest.mark.parametrize(("capacity", "full"), [(32, 0), (100, 2), (None, 0), (500, 3)])
def test_a_peak_counts_from_the_loaded_model_to_the_end_of_each_point(meter, peaks, capacity, full, monkeypatch, tmp_path):
    heap, calls = Heap(), iter(CALLS)
    if meter == "cuda":
        cuda_meter(monkeypatch, heap)
    else:
        process_meter(monkeypatch, heap, meter == "VmHWM")

    class Allocating(CachedDecoder):
        def __call__(self, *args, **kwargs):
            heap.allocate(*next(calls))
            return super().__call__(*args, **kwargs)

    config = CacheConfig(Dense()) if capacity is None else CacheConfig(Window(), capacity)
    job = Job(model_of("llama"), config, RandomTokens(1), 32, EAGER, tmp_path / "t", lambda *_: None, open=Allocating)
    metrics = Memory.run(MemoryOptions(tokens=160, points=4), job)
    assert next(calls, None) is None
    assert [(point.position, point.peak_bytes) for point in metrics.curve] == [
        (position, peak * MIB) for position, peak in zip((40, 80, 120, 160), peaks, strict=True)
    ]
    assert metrics.peak_bytes == peaks[3] * MIB
    assert metrics.growth_bytes == (peaks[3] - peaks[full]) * MIB, "from the first point after the cache was full"
    rose = [flag for flag in metrics.flags if "rose" in flag]
    is_leak = capacity is not None and peaks[3] - peaks[full] > 8
    assert rose == ([f"the peak rose by {metrics.growth_bytes:,} bytes after the cache was full"] if is_leak else [])
    if meter == "cuda":
        assert metrics.allocated_bytes == 3 * MIB
