"""The Triton kernels and captured steps, on a CPU: with Triton's interpreter and a stand-in for CUDA graphs."""

from functools import cache

import pytest
import torch
from factories import Odd, needs_triton
from helpers import DEVICE, H2O, CacheConfig, Dense, Model, Random, SinkWindow, adopt, model_of, nll, tiny_model, tokens_of

from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import KERNELS, PLAIN_WALK
from kvbench.harness.kernels import choose, cuda, cuda_attention

pytestmark = pytest.mark.slow("Triton's interpreter")


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)


@cache
def one_layer() -> Model:
    """Every layer takes the interpreter seconds, and the odd shapes have several."""
    return adopt(tiny_model("llama", vocab_size=96, num_hidden_layers=1).to(DEVICE))


def both(model, config: CacheConfig, streams: int = 1) -> tuple[CachedDecoder, CachedDecoder]:
    fast = CachedDecoder(model, config, streams, KERNELS)
    return fast, CachedDecoder(model, config, streams, PLAIN_WALK)


@needs_triton
@pytest.mark.parametrize(
    ("policy", "mode"),
    [(Odd(), "cache"), (H2O(), "stream"), (SinkWindow(2), "clamped"), (Random(), "cache")],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)  # each takes the interpreter seconds, and positions don't depend on the policy
def test_walk_and_step_are_the_plain_ones(in_triton, policy, mode):
    """Filling the cache, walking a block and single tokens give the same NLL and keep exactly the same tokens."""
    model, tokens = one_layer(), tokens_of(9, 2)
    fast, plain = both(model, CacheConfig(policy, 5, mode, 6, seed=2**40 + 5), 2)
    assert "compiled walk" in fast.walks[0].offers
    assert "step kernel" in fast.walks[0].offers
    ours, theirs = (torch.cat([read(x) for x in tokens.split([3, 4, 1, 1], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


@needs_triton
@pytest.mark.parametrize("family", ["gpt_neox", "deepseek_v3", "smollm3", "mistral"])
def test_odd_shapes(in_triton, family):
    """Covers partial RoPE, K and V of different dims, no RoPE, a sliding window, one query head per KV head."""
    model = adopt(tiny_model("mistral", vocab_size=96, sliding_window=6).to(DEVICE)) if family == "mistral" else model_of(family)
    tokens = tokens_of(11)
    fast, plain = both(model, CacheConfig(H2O(), 7))
    ours, theirs = (torch.cat([read(x) for x in tokens.split([5, 4, 1, 1], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()


@needs_triton
@pytest.mark.parametrize("config", [CacheConfig(H2O(), 16), CacheConfig(Dense(), None, "stream")], ids=str)
def test_a_step_over_several_parts(in_triton, monkeypatch, config):
    """Uses parts of 16 slots, of which the last has one, and angles from two tables."""
    monkeypatch.setattr(cuda_attention, "_MAX_TILE_BYTES", 16)
    model, tokens = one_layer(), tokens_of(18)
    fast, plain = both(model, config)
    ours, theirs = (torch.cat([read(x) for x in tokens.split([15, 1, 1, 1], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()
