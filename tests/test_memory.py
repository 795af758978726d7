"""A bounded policy's memory does not grow with the stream, and the memory task reports what is allocated."""

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import children
import psutil
import pytest
import torch
from helpers import bench_in as bench
from helpers import model_of, tokens_of

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.evict import Pages
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER
from kvbench.harness.models import load
from kvbench.harness.models.shape import readable_shape
from kvbench.harness.records import RecordStore
from kvbench.harness.records.metrics import READ_AT_POINTS
from kvbench.harness.run import child
from kvbench.harness.run.order import Order, UnsentData
from kvbench.harness.run.prepare import prepare
from kvbench.harness.run.request import RunOptions, RunRequest
from kvbench.harness.tasks.memory import Memory, MemoryOptions
from kvbench.harness.tasks.memory.meter_stream import tensor_bytes
from kvbench.harness.tasks.task import Job, RandomTokens
from kvbench.policies.adakv import AdaKV
from kvbench.policies.criticalkv import CriticalKV
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.knorm import Knorm
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.sink_window import SinkWindow

pytestmark = pytest.mark.slow("processes of bench")

# A process for each policy, forked from one that has imported everything; its peak begins at what it holds then.
CODE = r"""
import json, os, re, sys
from pathlib import Path
from helpers import model_of, tokens_of
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.core.plugins import policy_class
model, tokens_read = model_of("llama"), json.loads(sys.argv[1])
kinds = {name: policy_class(name) for name in tokens_read}
for name, tokens in tokens_read.items():
    if os.fork() == 0:
        read, peaks = decoder(model, CacheConfig(kinds[name](), 32 if name != "dense" else None)), []
        for count in (1_000, tokens - 1_000):
            for block in tokens_of(count).split(64, 1):
                read(block)
            peaks.append(int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
        print(json.dumps([name, peaks[1] - peaks[0]]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
BOUNDED = ["sink_window", "h2o", "recompute_window"]


@pytest.fixture(scope="module")
def growth() -> dict[str, int]:
    """Bytes by which a process's peak grows from token 1,000 to the last, for each policy."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to read a process's own peak")
    asked = json.dumps({**dict.fromkeys(BOUNDED, 8_000), "dense": 30_000})
    done = subprocess.run(
        [sys.executable, "-c", CODE, asked],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("policy", BOUNDED)
def test_peak_memory_is_flat_over_the_stream(policy, growth):
    assert growth[policy] < 8 * 2**20  # bytes; K/V of 7,000 tokens would be 3.5 MiB, twice that with copies


def test_the_same_measurement_sees_a_cache_that_does_grow(growth):
    assert growth["dense"] > 16 * 2**20


def stores(read: CachedDecoder) -> list[object]:
    """The objects that hold the tensors of K and V."""
    return [x for walk in read.walks for x in walk.slots.tensors.pool or (walk.slots.tensors.keys, walk.slots.tensors.values)]


@pytest.fixture
def uncollected():
    """No garbage collector runs, so that only what nothing refers to is freed."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        (CacheConfig(Dense(), None), 0),
        (CacheConfig(Dense(), None, kv=Codec("int8")), 0),
        (CacheConfig(H2O(), 16, evict="prompt"), 64),
        (CacheConfig(AdaKV(), 16), 0),
    ],
    ids=["dense", "int8", "after a cut", "pool"],
)
def test_outgrown_tensors_are_freed_at_once(uncollected, config, prompt):
    """Each cache and its views must not refer to each other, or a growing cache is held many times over."""
    read, tokens = CachedDecoder(model_of("llama"), config), tokens_of(600)
    if prompt:
        read.read_prompt(tokens[:, :prompt], 32, once=True)
    ever: weakref.WeakSet[object] = weakref.WeakSet(stores(read))
    number = len(ever)
    for block in tokens[:, prompt:].split(40, 1):
        read(block)
        grown = [store for store in stores(read) if store not in ever]
        number += len(grown)
        ever.update(grown)
        del grown
    assert number > len(stores(read)), "nothing grew"
    assert set(ever) == set(stores(read))


OPTIONS = MemoryOptions(tokens=160, points=4)


def run(tmp_path, config, **rest):
    job = Job(model_of("llama"), config, RandomTokens(1), 32, EAGER, tmp_path / "t", lambda tokens, text: None, **rest)
    return Memory.run(OPTIONS, job).as_json()


@pytest.mark.parametrize(
    "config",
    [
        CacheConfig(Dense()),
        CacheConfig(H2O(), 32),
        CacheConfig(RecomputeWindow(), 32),
        CacheConfig(Dense(), kv=Kivi("kivi4", residual=32)),
        CacheConfig(H2O(), 32, evict=Pages(8), kv=Codec("int2", recent=8)),
    ],
    ids=lambda c: f"{type(c.policy).__name__} {c.kv or ''}",
)
def test_what_is_reported_is_what_is_found_and_what_the_formula_says(tmp_path, config):
    found = run(tmp_path, config)
    assert found["kv_bytes"] == found["expected_kv_bytes"]
    assert abs(found["allocated_bytes"] - found["kv_bytes"] - found["state_bytes"]) < 2**18
    assert not [f for f in found["flags"] if "rose" not in f]
    assert [c["position"] for c in found["curve"]] == [40, 80, 120, 160]
    assert found["kv_held_bytes"] <= found["kv_bytes"]


def test_memory_that_was_free_before_does_not_hide_a_cache(tmp_path):
    """Loading a model leaves free memory in the C library's heap. The quickstart's dense cache of 1 MiB once moved in there."""
    (tmp_path / "s.yaml").write_text(
        "{suite: s, version: 1, model: {id: 'builtin:sink_2'}, task: {name: memory, tokens: 512}, capacity: 64, "
        "policies: [dense]}"
    )
    request = RunRequest(str(tmp_path / "s.yaml"), threads=1)
    for found in request.measure(tmp_path / "results", request.cells()):
        assert found.status == "ok", found.error
        assert found.metrics.peak_bytes > found.metrics.kv_held_bytes > 100_000
        too_good = found.metrics.as_json() | {"peak_bytes": found.metrics.kv_held_bytes - 1}
        assert [*type(found.metrics).from_json(too_good).impossible()]
        assert not [*type(found.metrics).from_json(too_good | {"how": f"psutil, {READ_AT_POINTS}"}).impossible()]


class Hoarder(CachedDecoder):
    """Keeps copies of evicted tokens and does not report them."""

    def __call__(self, *args, **kwargs):
        self.hoard = [*getattr(self, "hoard", []), torch.zeros(2**18)]
        return super().__call__(*args, **kwargs)


class Liar(CachedDecoder):
    """Reports one slot too few."""

    @property
    def kv_bytes(self) -> int:
        return super().kv_bytes - 256 * 2


@pytest.mark.parametrize(("kind", "says"), [(Hoarder, "are allocated"), (Liar, "by the model's shapes")])
def test_a_cache_of_another_size_than_it_says_is_flagged(kind, says, tmp_path):
    found = run(tmp_path, CacheConfig(SinkWindow(4), 32), open=kind)
    assert any(says in f for f in found["flags"])


SUITE = """
suite: one
version: 1
model: {{id: "random:stories-260k"}}
task: {{name: memory, tokens: {tokens}, points: {points}}}
capacity: 8
policies: [{policies}]
"""


def order_of(cells, options):
    return Order.from_groups([prepare(cells, options.device, None)], cells, options, 1)


def measure(order, progress=lambda tokens, text: None):
    return child.measure(order, progress).outcomes


def test_a_coded_cell_goes_to_a_process_and_comes_back(tmp_path, monkeypatch):
    """The codec and the settings of pages are pickled."""
    monkeypatch.chdir(tmp_path)
    entry = "{name: window, evict: {pages: 4, worth: max}, kv: {codec: int4, exempt: {recent: 2}}}"
    Path("one.yaml").write_text(SUITE.format(tokens=64, points=4, policies=entry))
    (cell,) = RunRequest("one.yaml").cells()
    (outcome,) = measure(order_of([cell], RunOptions(torch.device("cpu"), block=16)))
    assert outcome.failure is None
    assert outcome.metrics.kv_bytes == outcome.metrics.expected_kv_bytes
    assert outcome.metrics.kv_bytes == readable_shape("random:stories-260k", None).kv_bytes(8 + 3, 1, 4, cell.kv)


@pytest.fixture
def order(tmp_path, monkeypatch):
    """Return an order of one cell."""
    monkeypatch.chdir(tmp_path)

    def of(tokens=64, points=4):
        Path("one.yaml").write_text(SUITE.format(tokens=tokens, points=points, policies="window"))
        return order_of(RunRequest("one.yaml").cells(), RunOptions(torch.device("cpu"), block=16))

    return of


def changed(order, **fields):
    return replace(order, groups=[[replace(order.groups[0][0], **fields)]])


def test_errors_of_its_process_are_passed_on(order):
    with pytest.raises(UserError, match="its data differ from those of the process that started the run"):
        measure(changed(order(), data=UnsentData("another", 64)))
    with pytest.raises(child.ChildError) as raised:
        measure(changed(order(), facts={}))
    assert raised.value.failure["kind"] == "KeyError"
    assert raised.value.failure["where"].endswith("in _here")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (children.killed, MemoryError, "its process was killed by signal 9"),
        (children.silent, RuntimeError, "ended with exit code 3 and without an answer"),
    ],
)
def test_a_process_that_ends_without_an_answer_is_an_error(monkeypatch, order, target, error, message):
    """The system kills a process that takes too much memory."""
    monkeypatch.setattr(child, "run_child", target)
    with pytest.raises(error, match=message):
        measure(order())


RUN = """
import pickle, signal, sys
from kvbench.harness.run import child

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits "ignore"
child.measure(pickle.load(open(sys.argv[1], "rb")), lambda tokens, text: print(text, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_its_process_ends_with_the_run_that_is_killed(number, order):
    """Without writing anything: its work would take minutes without output. Ctrl-C reaches all processes of a terminal.

    The script has no guard `if __name__ == "__main__"`, and is not run again.
    """
    Path("order").write_bytes(pickle.dumps(order(tokens=10**8)))
    Path("run.py").write_text(RUN)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "run.py", "order"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run_:
        started, process = time.monotonic(), []
        while not process and time.monotonic() < started + 120:
            time.sleep(0.05)
            process = [p for p in psutil.Process(run_.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        assert process
        time.sleep(1)
        run_.send_signal(number) if number == signal.SIGKILL else os.killpg(run_.pid, number)
        _, alive = psutil.wait_procs(process, timeout=60)
        for one in alive:
            one.kill()
        assert not alive
        stderr = run_.stderr.read()
    assert stderr.count("Traceback") == (number == signal.SIGINT), "of this process, which catches nothing; never of the other"


def test_its_process_ends_when_whoever_listens_does(order):
    """Ctrl-C while progress is shown: the exception is passed on, and the process is gone."""

    def interrupted(tokens, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(order(10**7, 10**4), interrupted)
    assert not [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


def test_a_shape_that_does_not_fit_is_a_failed_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "free_bytes", lambda device: 2**30)
    args = [
        "run",
        "latency-cpu",
        "--set",
        "id=[random:llama-2-13b,random:stories-260k]",
        "--policy",
        "window",
        "--set",
        "capacity=8",
    ]
    short = ["tokens=64", "prompt=16", "rounds=6", "sittings=2", "most_sittings=2", "steps=1"]
    done = bench(*args, *(x for s in short for x in ("--set", s)), cwd=tmp_path)
    assert done.returncode == 4
    assert "out of memory: its weights take" in done.stderr
    records, _ = RecordStore(tmp_path / "results").read_all()
    assert sorted(r.status for r in records) == ["failed", "ok"]


@pytest.mark.parametrize("policy", [SinkWindow(4), Knorm(), CriticalKV()])
def test_tensors_are_counted_once_and_the_models_not_at_all(policy):
    model = model_of("llama")
    read = decoder(model, CacheConfig(policy, 1000))
    assert 0 <= tensor_bytes(read, model) - read.kv_bytes - read.state_bytes < 2**12
    for _ in range(3):
        read(torch.zeros(1, 1, dtype=torch.int64))
    assert tensor_bytes(read, model) - read.kv_bytes - read.state_bytes < 2**18, "a step leaves nothing behind"
    copy = read.fork([0])
    assert tensor_bytes([read, copy], model) > 1.9 * tensor_bytes(read, model)
