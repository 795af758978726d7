"""A bounded policy's memory does not grow with the stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = r"""
import re, sys
from pathlib import Path
from conftest import model_of, tokens_of
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.core.plugins import policy_class
model = model_of("llama")
read = decoder(model, CacheConfig(policy_class(sys.argv[1])(), 32 if sys.argv[1] != "dense" else None))
for block in tokens_of(int(sys.argv[2])).split(64, 1):
    read(block)
print(int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read a process's own peak")


def peak(policy: str, tokens: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE, policy, str(tokens)], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent, env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.slow("processes of its own")
@pytest.mark.parametrize("policy", ["window", "sink_window", "h2o", "random", "recompute_window"])
def test_peak_memory_is_flat_over_the_stream(policy):
    short, long = peak(policy, 1_000), peak(policy, 8_000)
    assert long - short < 8 * 2**20  # bytes; K/V of 7,000 tokens would be 3.5 MiB, twice that with copies


@pytest.mark.slow("processes of its own")
def test_the_same_measurement_sees_a_cache_that_does_grow():
    assert peak("dense", 30_000) - peak("dense", 1_000) > 16 * 2**20
