"""Latency and memory as they are counted: what is timed, when it counts as known, and figures of a known clock and allocator."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from helpers import bench_in as bench
from helpers import model_of

from kvbench.harness.core import device
from kvbench.harness.core.device import Marks
from kvbench.harness.core.intervals import median_interval
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER
from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import Metrics
from kvbench.harness.run.request import RunRequest
from kvbench.harness.tasks.latency import Latency, LatencyMetrics, LatencyOptions, lane, time_cells
from kvbench.harness.tasks.latency.lane import Lane, roofline, timing
from kvbench.harness.tasks.memory import Memory, MemoryOptions
from kvbench.harness.tasks.memory import meter_stream as memory
from kvbench.harness.tasks.task import Job, RandomTokens
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.reset import Reset
from kvbench.policies.window import Window

SHORT = LatencyOptions(tokens=300, prompt=20, steps=2, rounds=6, sittings=2, most_sittings=2, precision=0.9)
DEVICE = {"bandwidth": 1e10, "multiply_rate": 1e11}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setattr(time_cells, "bandwidth", lambda device: DEVICE["bandwidth"])
    monkeypatch.setattr(time_cells, "multiply_rate", lambda device, dtype: DEVICE["multiply_rate"])

    def figures(configs, options=SHORT, **rest):
        jobs = [
            Job(model_of("llama"), config, RandomTokens(1), 64, EAGER, tmp_path / f"{i}.npy", lambda tokens, text: None, **rest)
            for i, config in enumerate(configs)
        ]
        results = dict(Latency.run_together(options, jobs))
        return [results[i].as_json() if isinstance(results[i], Metrics) else results[i] for i in range(len(jobs))]

    return figures


def test_a_cell_that_fails_or_does_not_fit_leaves_the_others_alone(measured):
    class Broken(Window):
        def importance(self, view):
            raise RuntimeError("broken on purpose")

    broken, huge, fine = measured([CacheConfig(Broken(), 16), CacheConfig(Window(), 10**12), CacheConfig(Window(), 16)])
    assert isinstance(broken, RuntimeError)
    assert isinstance(huge, MemoryError)
    assert fine["step_ms"] > 0


@pytest.mark.slow("measures suites")
def test_a_step_in_less_time_than_its_bytes_take_fails_the_cell(tmp_path, monkeypatch):
    """The forward pass has slipped out of the clock."""

    def time_round(self):
        self.step()
        marks = Marks(self.job.model.device)
        for _ in range(self._steps_per_round + 1):
            marks.mark()
        self.round_ms.append(marks.milliseconds())

    (tmp_path / "s.yaml").write_text(
        "{suite: s, version: 1, model: {id: 'builtin:sink_1'}, task: {name: latency, tokens: 64, prompt: 8, "
        "rounds: 6, sittings: 2, most_sittings: 2}, capacity: 8, policies: [dense, window]}"
    )
    request = RunRequest(str(tmp_path / "s.yaml"), threads=1)
    monkeypatch.setattr(Lane, "time_round", time_round)
    for found in request.measure(tmp_path / "wrong", request.cells()):
        assert found.status == "failed"
        assert re.fullmatch(r"better than is possible: step_ms is .* ms or more on this device", found.error.message), found.error


@pytest.mark.parametrize(("moved", "share"), [(2**20, 0.2), (2**30, 0.8)])
def test_what_is_possible_depends_on_whether_a_processors_cache_may_hold_it(measured, moved, share):
    (found,) = measured([CacheConfig(Window(), 16)])
    bound = {"bytes": moved, "operations": 10, "ms": 1e3 * moved / DEVICE["bandwidth"]}
    for ms, sentences in ((1.01 * share * bound["ms"], 0), (0.99 * share * bound["ms"], 1)):
        assert len([*LatencyMetrics.from_json(found | {"step_ms": ms, "roofline": bound}).impossible()]) == sentences
    busy = {"bytes": 1, "operations": DEVICE["multiply_rate"] / 1e3, "ms": 1.0}
    assert [*LatencyMetrics.from_json(found | {"step_ms": 0.7, "roofline": busy}).impossible()]


@pytest.mark.parametrize(("settled_after", "sittings"), [([1], 2), ([4], 4), ([99], 6), ([3, 5], 5)])
def test_sittings_go_on_until_every_cell_is_settled(measured, monkeypatch, settled_after, sittings):
    """At least two, at most six here. The capacity of a cell is the number of sittings after which it is settled."""
    monkeypatch.setattr(Lane, "settled", property(lambda lane: len(lane.sitting_ms) >= lane.job.config.capacity))
    configs = [CacheConfig(Window(), capacity) for capacity in settled_after]
    found = measured(configs, SHORT.model_copy(update={"tokens": 40, "most_sittings": 6}))
    assert [(x["sittings"], x["settled"]) for x in found] == [(sittings, capacity <= 6) for capacity in settled_after]


def test_the_interval_of_a_median_is_made_of_the_right_order_statistics():
    """Ranks of the textbooks: n = 6: 1 and 6, n = 10: 2 and 9, n = 20: 6 and 15, n = 40: 14 and 27."""
    for n, low, high in [(6, 1, 6), (10, 2, 9), (20, 6, 15), (40, 14, 27)]:
        assert median_interval([float(x) for x in range(1, n + 1)]) == (low, high)
    assert median_interval([1.0, 2.0]) == (-math.inf, math.inf)


def test_the_error_of_a_timing_sees_what_differs_between_sittings():
    steady = [[[1.0, 1.0, 9.0]] * 8 for _ in range(3)]  # a wild step in every round moves nothing
    assert timing(steady) == (1.0, 0.0)
    shifted = [*[[[1.0]] * 8] * 4, [[1.2]] * 8]  # too few rounds to move the interval of their median
    assert timing(shifted) == (1.0, pytest.approx(0.1))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_roofline_counts_every_byte_once(batch):
    model = model_of("llama")
    head_and_layers = sum(p.nbytes for n, p in model.hf.named_parameters() if "embed_tokens" not in n)
    read = decoder(model, CacheConfig(Window(), 16), batch)
    for block in torch.zeros(batch, 40, dtype=torch.int64).split(10, 1):
        read(block)
    bound = roofline(model, read, batch, DEVICE)
    assert bound["bytes"] == head_and_layers + read.kv_bytes + read.state_bytes
    assert bound["ms"] == pytest.approx(1e3 * max(bound["bytes"] / 1e10, bound["operations"] / 1e11))
    again = decoder(model, CacheConfig(RecomputeWindow(), 16), batch)
    again(torch.zeros(batch, 40, dtype=torch.int64))
    afresh = roofline(model, again, batch, DEVICE)
    assert afresh["bytes"] == head_and_layers
    head = 2 * batch * model.hf.lm_head.weight.numel()  # of the last token alone
    assert afresh["operations"] == 17 * (bound["operations"] - head) + head


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """The CPU suite, cut short, twice: the second time only some of its policies."""
    folder = tmp_path_factory.mktemp("latency")
    short = ["tokens=64", "prompt=16", "rounds=6", "sittings=2", "most_sittings=2", "steps=1", "capacity=[16]"]
    args = ["run", "latency-cpu", "--set", "id=random:stories-260k", *(x for s in short for x in ("--set", s)), "--threads", 1]
    done = bench(*args, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "args.json").write_text(json.dumps([str(a) for a in args]))
    return folder


@pytest.mark.slow("measures suites")
def test_cells_measured_side_by_side_are_finished_together_or_measured_again_together(ran):
    args = json.loads((ran / "args.json").read_text())
    assert bench(*args, cwd=ran).stderr.count("6 cells were finished before and skipped") == 1
    next((ran / "results").rglob("*dense*.npy")).unlink()
    assert "skipped" not in bench(*args, cwd=ran).stderr


@pytest.mark.slow("measures suites")
def test_threads_are_part_of_the_question(ran, tmp_path, monkeypatch):
    """Two threads of a tiny model spend minutes waiting for each other, so they are only said to be two."""
    threads = [1]
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])

    def measured(options, jobs):
        return [(i, RuntimeError("it is measured")) for i in range(len(jobs))]

    folder = shutil.copytree(ran, tmp_path / "ran")
    args = json.loads((ran / "args.json").read_text())
    monkeypatch.setattr(Latency, "run_together", measured)
    assert "6 cells were finished before and skipped" in bench(*args, cwd=folder).stderr
    args[args.index("--threads") + 1] = "2"
    said = bench(*args, cwd=folder).stderr
    assert "skipped" not in said
    assert said.count("FAILED, RuntimeError: it is measured") == 6


@pytest.mark.slow("measures suites")
def test_a_run_that_is_killed_keeps_the_records_of_finished_groups(tmp_path, monkeypatch):
    """Two cells whose caches don't fit side by side; the run is killed in the second group."""
    (tmp_path / "two.yaml").write_text("""
suite: two
version: 1
model: {id: "random:stories-260k"}
task: {name: latency, tokens: 40, prompt: 16, rounds: 6, sittings: 2, most_sittings: 2, steps: 1}
policies: [{name: window, capacity: [8, 16]}]
""")

    def killed_in_the_second_group(options, lanes):
        if lanes[0].job.config.capacity == 16:
            raise KeyboardInterrupt
        return measure_group(options, lanes)

    measure_group = time_cells._measure
    monkeypatch.setattr(time_cells, "_groups_that_fit", lambda lanes: [[lane] for lane in lanes])
    monkeypatch.setattr(time_cells, "_measure", killed_in_the_second_group)
    request, store = RunRequest(str(tmp_path / "two.yaml"), threads=1, device="cpu"), RecordStore(tmp_path / "results")
    with pytest.raises(KeyboardInterrupt):
        request.measure(tmp_path / "results", request.cells())
    records, problems = store.read_all()
    assert ([(r.cell.capacity, r.status) for r in records], problems) == ([(8, "ok")], [])
    assert store.trace_path(records[0], Latency.trace).exists()


@pytest.mark.parametrize("filled", [True, False])
def test_on_a_gpu_random_keys_stand_for_the_stream_and_on_a_cpu_it_is_read(measured, monkeypatch, filled, tmp_path):
    """Either way steps are timed at the same positions, with the same slots in use, and the figures are the same in kind."""
    read_tokens = []
    plain = CachedDecoder.__call__
    monkeypatch.setattr(
        CachedDecoder, "__call__", lambda self, x, *a, **k: (read_tokens.append(x.shape[1]), plain(self, x, *a, **k))[1]
    )
    if filled:
        monkeypatch.setattr(lane, "can_be_filled", lambda read: isinstance(read, CachedDecoder), raising=False)
    configs = [CacheConfig(Dense()), CacheConfig(Window(), 16), CacheConfig(H2O(), 32), CacheConfig(RecomputeWindow(), 16)]
    dense, window, h2o, *recompute = measured(configs[: 3 if filled else 4])
    prompts = 3 * (7 + 1)  # cells; the first sitting and the second
    blocks = [count for count in read_tokens if count > 1]
    if filled:
        assert blocks == [20] * prompts
    else:
        assert sum(blocks) > 20 * prompts + 3 * (300 - 20)
        assert (recompute[0]["curve"][-1]["used_slots"], recompute[0]["bookkeeping_share"]) == (17, 0)
    for found in (dense, window, h2o, *recompute):
        assert [c["position"] for c in found["curve"]] == [256, 300]
        assert found["steps"] == 2 * 6 * 2 == np.load(tmp_path / "0.npy").size
        assert len(found["rounds_ms"]) == 12
        assert found["together"] == dense["together"]
    assert [x["curve"][-1]["used_slots"] for x in (window, h2o)] == [17, 33]
    assert window["curve"][-1]["attended_slots"] == 17
    assert dense["curve"][-1]["used_slots"] > 300
    assert dense["curve"][-1]["attended_slots"] == 512
    assert window["kv_bytes"] == model_of("llama").kv_bytes(16)
    assert 0 < h2o["bookkeeping_share"] < 1


def test_a_16_bit_rate_of_a_cpu_is_at_least_that_of_float32(monkeypatch):
    """Without instructions for 16 bits a large product took 40 times as long as in float32, and a step looked impossible."""
    monkeypatch.setitem(device._MATRIX_SIDE, "cpu", 8)
    monkeypatch.setattr(device, "best_seconds", lambda work, on, repeats: 0.5 if work().dtype == torch.float32 else 20.0)
    assert device.multiply_rate(torch.device("cpu"), torch.bfloat16) == 2 * 8**3 / 0.5


def test_growth_is_reserved_before_and_not_inside_a_step():
    read = decoder(model_of("llama"), CacheConfig(Dense()))
    read(torch.zeros(1, 250, dtype=torch.int64))
    read.reserve(400)
    place = read.walks[0].slots.tensors.keys.tensor.data_ptr()
    for _ in range(300):
        read(torch.zeros(1, 1, dtype=torch.int64))
    assert read.walks[0].slots.tensors.keys.tensor.data_ptr() == place
    assert read.slots == (550, 768)


def test_what_does_not_settle_is_flagged_with_its_spread(measured):
    (found,) = measured([CacheConfig(Window(), 16)], SHORT.model_copy(update={"precision": 1e-9}))
    assert not found["settled"]
    assert found["flags"][0].startswith("unsettled: medians of 12 rounds lie between")
    assert found["spread_ms"][0] < found["spread_ms"][1]


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
    monkeypatch.setattr(time_cells, "_rates", lambda model: {"bandwidth": 1e15, "multiply_rate": 1e15})
    monkeypatch.setattr(time_cells, "RecomputeDecoder", lambda *_: lambda tokens: clock.spend(next(forward)))
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


def test_latency_times_a_reset_in_every_sitting(measured, tmp_path, monkeypatch):
    """The timed steps are fewer than those between two resets, so text is read until one is near."""
    timed, emptied = [False], []
    time_round, clear = Lane.time_round, CachedDecoder.clear

    def timing_round(self):
        timed[0] = True
        time_round(self)
        timed[0] = False

    def noting(self):
        emptied.append(timed[0])
        clear(self)

    monkeypatch.setattr(Lane, "time_round", timing_round)
    monkeypatch.setattr(CachedDecoder, "clear", noting)
    (figures,) = measured([CacheConfig(Reset(reread=40), 200)])
    assert emptied.count(True) == figures["sittings"] + len(figures["curve"]) - 1 == 2 + 1
    assert figures["kv_bytes"] == model_of("llama").kv_bytes(200)
    assert not [flag for flag in figures["flags"] if "bytes" in flag]
    assert figures["largest_ms"] == pytest.approx(np.median(np.load(tmp_path / "0.npy").reshape(2, -1).max(1)), rel=1e-4)


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
