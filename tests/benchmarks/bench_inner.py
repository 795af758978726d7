"""Times a decode step and a block of tokens per policy, with pytest-benchmark.

    make microbench                      (or: pytest tests/benchmarks/bench_inner.py)

Random weights of a small published shape, one thread, full caches. Compare only numbers of one run on one machine.
"""

import pytest
import torch

from kvbench.harness.core import plugins
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_model

CAPACITY = 512
POLICIES = ["dense", "window", "sink_window", "h2o", "random", "snapkv"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    directory = model_directory("random:stories-15m", None, False)
    return load_model(directory, "float32", torch.device("cpu"), random=True)


def filled(model, name: str):
    """A decoder with a full cache."""
    policy = plugins.policy_class(name)()
    read = decoder(model, CacheConfig(policy, CAPACITY if policy.evicts else None))
    tokens = torch.randint(model.hf.config.vocab_size, (1, CAPACITY + 64), generator=torch.Generator().manual_seed(0))
    for block in tokens.split(128, 1):
        read(block)
    read.reserve(10_000)
    return read


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.benchmark(group="one decode step")
def test_step(benchmark, model, name):
    read, token = filled(model, name), torch.tensor([[7]])
    benchmark.pedantic(read, (token,), rounds=60, warmup_rounds=3)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.benchmark(group="a block of 64 tokens, walked")
def test_block(benchmark, model, name):
    read = filled(model, name)
    tokens = torch.randint(model.hf.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    benchmark.pedantic(read, (tokens,), rounds=8, warmup_rounds=1)
