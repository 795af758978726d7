"""The Triton kernels and captured steps, on a CPU: with Triton's interpreter and a stand-in for CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, model_of, nll, tokens_of
from factories import Odd, needs_compiler, needs_triton

from kvbench.harness.engine import fastcheck
from kvbench.harness.engine.captured import StepGraphs
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.kernels import choose, cuda, cuda_attention
from kvbench.harness.engine.kernels.tracing import TRITON, traced
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST, KERNELS, PLAIN_WALK
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.sink_window import SinkWindow


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)


def both(model, config: CacheConfig, streams: int = 1) -> tuple[CachedDecoder, CachedDecoder]:
    fast = CachedDecoder(model, config, streams, KERNELS)
    return fast, CachedDecoder(model, config, streams, PLAIN_WALK)


@needs_triton
@pytest.mark.parametrize("mode", ["cache", "stream", "clamped"])
@pytest.mark.parametrize("policy", [H2O(), Random(), SinkWindow(2), Odd()], ids=lambda p: type(p).__name__)
def test_walk_and_step_are_the_plain_ones(in_triton, policy, mode):
    """Filling the cache, walking a block and single tokens give the same NLL and keep exactly the same tokens."""
    model, tokens = model_of("llama"), tokens_of(26, 2)
    fast, plain = both(model, CacheConfig(policy, 7, mode, 12, seed=2**40 + 5), 2)
    assert fast.walks[0].is_compiled
    assert fast.walks[0].steps_by_kernel
    ours, theirs = (torch.cat([read(x) for x in tokens.split([5, 15, 1, 1, 1, 1, 1, 1], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


@needs_triton
@pytest.mark.parametrize("family", ["gpt_neox", "deepseek_v3", "smollm3", "mistral"])
def test_odd_shapes(in_triton, family):
    """Covers partial RoPE, K and V of different dims, no RoPE, a sliding window, one query head per KV head."""
    model, tokens = model_of(family), tokens_of(30)
    fast, plain = both(model, CacheConfig(H2O(), 20))
    ours, theirs = (torch.cat([read(x) for x in tokens.split([18, 8, 1, 1, 1, 1], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


@needs_triton
@pytest.mark.parametrize("config", [CacheConfig(H2O(), 40), CacheConfig(Dense(), None, "stream")], ids=str)
def test_a_step_over_several_parts(in_triton, monkeypatch, config):
    """Uses parts of 16 slots, and angles from two tables."""
    monkeypatch.setattr(cuda_attention, "_MAX_TILE_BYTES", 16)
    model, tokens = model_of("llama"), tokens_of(44)
    fast, plain = both(model, config)
    ours, theirs = (torch.cat([read(x) for x in tokens.split([39, 1, 1, 1, 1, 1], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


@needs_triton
def test_streams_of_unequal_length(in_triton):
    model, tokens = model_of("llama"), tokens_of(14, 2)
    valid = torch.rand(2, 14, generator=torch.Generator().manual_seed(1)) < 0.7
    valid[:, 0] = True
    fast, plain = both(model, CacheConfig(H2O(), 5), 2)
    for t in range(14):
        ours, theirs = (read(tokens[:, t : t + 1], valid[:, t : t + 1]) for read in (fast, plain))
        torch.testing.assert_close(ours[valid[:, t]], theirs[valid[:, t]], atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()


def test_what_is_traced_reads_like_triton():
    assert traced(H2O(3).bind(8), TRITON) == ('tl.where(((step - position) < 3), float("inf"), state)', "(state + mass)")


class Recorded:
    """Stands in for a CUDA graph: replays the step and nothing else that the host would do."""

    made = 0

    def __init__(self, step, tokens):
        type(self).made += 1
        self.step = step

    def __call__(self, tokens):
        return self.step(tokens)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a stand-in where there is no CUDA")
@pytest.mark.parametrize(
    "config", [CacheConfig(H2O(), 9), CacheConfig(SinkWindow(2), 9, "stream"), CacheConfig(Dense())], ids=str
)
def test_captured_steps_follow_the_host(config, monkeypatch):
    """Covers filling, eviction, blocks between steps, and growth: one capture per state, the same logits."""
    monkeypatch.setattr(Recorded, "made", 0)
    model, tokens = model_of("llama"), tokens_of(600)
    plain, captured = CachedDecoder(model, config), CachedDecoder(model, config)
    captured.graphs = StepGraphs(Recorded)
    sizes = [1] * 14 + [30] + [1] * 8 + [220] + [1] * 8
    at = 0
    for size in sizes:
        block = tokens[:, at : at + size]
        torch.testing.assert_close(captured(block), plain(block))
        at += size
    assert captured.kept() == plain.kept()
    # Each state runs eagerly once: filling and full, or the first 256 slots and the next, grown.
    assert Recorded.made == 2
    assert captured.graphs.replayed == sizes.count(1) - 2
    fork = captured.fork([0])
    assert fork.graphs is not captured.graphs
    torch.testing.assert_close(fork(tokens[:, :1]), plain(tokens[:, :1]))


def test_a_model_that_can_not_be_captured_runs_eagerly_and_says_so():
    def refuse(step, tokens):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model, tokens = model_of("llama"), tokens_of(20)
    plain, captured = CachedDecoder(model, CacheConfig(H2O(), 6)), CachedDecoder(model, CacheConfig(H2O(), 6))
    captured.graphs = StepGraphs(refuse)
    for token in tokens.split(1, 1):
        torch.testing.assert_close(captured(token), plain(token))
    assert captured.graphs.refused == "operation not permitted when stream is capturing"
    assert captured.graphs.replayed == 0


@needs_compiler
def test_what_a_kernel_dies_of_is_told_and_the_plain_walk_used(monkeypatch):
    model, config = model_of("llama"), CacheConfig(H2O(), 8)
    whole = fast_method(model, config)

    def fails(*args, **kwargs):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(type(CachedDecoder(model, config, method=FASTEST).walks[0]._kernels.step), "__call__", fails)
    found = fast_method(model, config)
    assert whole.refused == ""
    assert (found.blocks, found.step) == ("walk", "plain")
    assert found.refused == "RuntimeError: out of resource: shared memory"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a stand-in where there is no CUDA")
@pytest.mark.parametrize(("ours", "step"), [(0.001, "captured"), (0.003, "plain")])
def test_a_captured_step_is_used_only_where_it_measures_faster(monkeypatch, ours, step):
    monkeypatch.setattr(fastcheck, "_step_seconds", lambda *of: (ours, 0.002))
    made = fastcheck.CachedDecoder

    def with_graphs(*args, method):
        read = made(*args, method=method)
        read.graphs = StepGraphs(Recorded) if method.captured else None
        return read

    monkeypatch.setattr(fastcheck, "CachedDecoder", with_graphs)
    found = fast_method(model_of("llama"), CacheConfig(H2O(), 8))
    assert found.step == step
    assert ("ms plainly" in found.refused) == (step == "plain")


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: captured steps")
@pytest.mark.parametrize("config", [CacheConfig(H2O(), 9), CacheConfig(SinkWindow(2), 9), CacheConfig(Dense())], ids=str)
def test_captured_on_cuda(config):
    model, tokens = model_of("llama"), tokens_of(400)
    fast, plain = CachedDecoder(model, config, method=FASTEST), CachedDecoder(model, config, method=PLAIN_WALK)
    for size in [1] * 14 + [30] + [1] * 8 + [220] + [1] * 8:
        block, tokens = tokens[:, :size], tokens[:, size:]
        torch.testing.assert_close(fast(block), plain(block), atol=2e-4, rtol=0)
    assert fast.graphs.refused == ""
    assert fast.graphs.replayed > 20
    assert fast.kept() == plain.kept()
