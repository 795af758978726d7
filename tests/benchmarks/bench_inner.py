"""Times the inner parts with pytest-benchmark: a decode step per policy, a slot write, importance, attention.

    make microbench                      (or: pytest tests/benchmarks/bench_inner.py)

Random weights of a small published shape, one thread, full caches. Compare only numbers of one run on one machine.
"""

from __future__ import annotations

import pytest
import torch

from kvbench.harness.core import plugins
from kvbench.harness.engine.attention import Terms, causal, weights
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.slot_rows import Rows
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


@pytest.mark.benchmark(group="slots of all layers")
def test_slot_write(benchmark, model):
    slots = filled(model, "window").walks[0].slots
    rows = Rows(slots, slots.num_slots)
    key, value = torch.rand(len(rows.keys), slots.shape.key_dim), torch.rand(len(rows.keys), slots.shape.value_dim)
    benchmark(rows.write, key, value)


@pytest.mark.parametrize("name", [n for n in POLICIES if plugins.policy_class(n).evicts])
@pytest.mark.benchmark(group="importance, all layers")
def test_importance(benchmark, model, name):
    slots = filled(model, name).walks[0].slots
    view = Rows(slots, slots.num_slots).view
    view.step = torch.full_like(view.layer, CAPACITY + 64)
    assert benchmark(slots.policy.importance, view).shape == view.rank.shape


@pytest.mark.parametrize("name", ["window", "h2o"])
@pytest.mark.benchmark(group="eviction, all layers")
def test_eviction(benchmark, model, name):
    slots = filled(model, name).walks[0].slots
    rows = Rows(slots, slots.num_slots)
    rows.view.step = torch.full_like(rows.view.layer, CAPACITY + 64)

    def step() -> None:
        slots.tensors.flat_rank.index_fill_(0, slots.tensors.free, CAPACITY)
        rows.release(None, True, False)

    benchmark(step)


@pytest.mark.parametrize("slots", [128, 512, 2048])
@pytest.mark.benchmark(group="attention of one token, one layer")
def test_attention(benchmark, slots):
    query, keys, values = torch.rand(6, 1, 48), torch.rand(6, slots, 48), torch.rand(6, slots, 48)

    def attend() -> torch.Tensor:
        mass = weights(torch.bmm(query, keys.transpose(1, 2)), Terms(1.0), 6)
        return torch.bmm(mass, values)

    assert benchmark(attend).shape == query.shape


@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.benchmark(group="causal attention of a block of 256, one layer")
def test_causal(benchmark, length):
    query, keys, values = torch.rand(1, 6, 1, 256, 48), torch.rand(1, 6, length, 48), torch.rand(1, 6, length, 48)
    assert benchmark(causal, query, keys, values, Terms(0.1)).shape == query.shape
