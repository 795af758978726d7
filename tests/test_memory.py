"""A bounded policy's memory does not grow with the stream."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from conftest import model_of, tokens_of

from kvbench.harness.core.codec import Codec
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.policies.adakv import AdaKV
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O

# A process for each policy, forked from one that has imported everything; its peak begins at what it holds then.
CODE = r"""
import json, os, re, sys
from pathlib import Path
from conftest import model_of, tokens_of
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
BOUNDED = ["window", "sink_window", "h2o", "random", "recompute_window"]


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read a process's own peak")


@pytest.fixture(scope="module")
def growth() -> dict[str, int]:
    """Bytes by which a process's peak grows from token 1,000 to the last, for each policy."""
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


@pytest.mark.slow("processes of its own")
@pytest.mark.parametrize("policy", BOUNDED)
def test_peak_memory_is_flat_over_the_stream(policy, growth):
    assert growth[policy] < 8 * 2**20  # bytes; K/V of 7,000 tokens would be 3.5 MiB, twice that with copies


@pytest.mark.slow("processes of its own")
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
