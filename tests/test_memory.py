"""A bounded policy's memory does not grow with the stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
