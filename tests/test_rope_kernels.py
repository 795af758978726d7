"""The kernels that pair, rotate and merge, in Triton's interpreter; and the closed form that is made of them."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, model_of, nll, tokens_of
from factories import needs_triton

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import TOKEN_BY_TOKEN, Method
from kvbench.harness.kernels import flex, rope
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

pytestmark = [needs_triton, pytest.mark.slow("Triton's interpreter")]


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setattr(rope, "_DEVICES", {DEVICE.type})


@pytest.mark.parametrize(
    ("family", "mode", "policy", "capacity", "sizes"),
    [
        ("llama", "cache", SinkWindow(3), 70, [128, 1, 128]),  # half-split pairs, from an empty cache
        ("qwen3", "stream", SinkWindow(3), 200, [77, 128, 128]),  # crosses into eviction at an odd position
        ("gpt_neox", "clamped", SinkWindow(3), 70, [99, 128, 128]),  # partial RoPE; some of those held stay
        ("smollm3", "cache", SinkWindow(2), 150, [128, 128]),  # a layer without RoPE
        ("cohere", "cache", SinkWindow(2), 70, [128, 128]),  # interleaved pairs
        ("llama", "cache", Window(), 300, [128, 256, 128]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_the_closed_form_by_kernels_is_the_walk(in_triton, monkeypatch, family, mode, policy, capacity, sizes):
    """The same NLL, the same tokens kept, and the steps after them; FlexAttention is uncompiled."""
    monkeypatch.setattr(flex, "_DEVICES", {DEVICE.type})
    launched, kernels = [], rope._kernels()
    monkeypatch.setattr(rope, "_kernels", lambda: launched.append(1) or kernels)
    model, tokens = model_of(family), tokens_of(sum(sizes))
    config = CacheConfig(policy, capacity, mode, 90)
    closed, walked = CachedDecoder(model, config, method=Method(flex=True)), CachedDecoder(model, config, method=TOKEN_BY_TOKEN)
    ours = torch.cat([closed(block) for block in tokens.split(sizes, 1)], 1)
    theirs = torch.cat([walked(block) for block in tokens.split(54, 1)], 1)
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert closed.kept() == walked.kept()
    torch.testing.assert_close(closed(tokens[:, :1]), walked(tokens[:, :1]), atol=2e-4, rtol=0)
    assert launched
