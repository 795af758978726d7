"""The kernels that pair, rotate and merge, in Triton's interpreter; and the closed form that is made of them."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, model_of, nll, tokens_of
from factories import needs_triton

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.rotary import Rotation, _candidates, rotate
from kvbench.harness.kernels import flex, rope
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

DIMS = [8, 80, 128] if DEVICE.type == "cpu" else [8, 64, 80, 96, 128, 256]  # the interpreter takes seconds


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


pytestmark = [needs_triton, pytest.mark.slow("Triton's interpreter")]


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setattr(rope, "_DEVICES", {DEVICE.type})


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layouts(dim: int) -> list[Rotation]:
    """Half-split and interleaved pairs of all dims, of the first half and of the last half of the dims."""
    tables = [torch.rand(pairs, generator=torch.Generator().manual_seed(pairs)) for pairs in (dim // 2, dim // 4)]
    return list(_candidates(dim, tables, DEVICE))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_is_the_plain_one(in_triton, dim, dtype):
    """From heads that lie beside each other into part of a larger tensor, which is otherwise left alone."""
    assert len(layouts(dim)) == 6
    for rotation in layouts(dim):
        x = drawn(2, 19, 3, dim, dtype=dtype).transpose(1, 2)
        factors = rotation.factors(torch.arange(5, 24, device=DEVICE), dtype, 100)
        for turn in (factors, None):
            out = torch.full((2, 3, 40, dim), 7, device=DEVICE, dtype=dtype)
            given, halves = rope.pairing(rotation, x)
            rope.rotate_into(out[:, :, 7:26], given, turn, halves)
            paired = rotation.pair(x).contiguous()
            expected = paired if turn is None else rotate(paired, turn)
            torch.testing.assert_close(out[:, :, 7:26], expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
            assert (out[:, :, :7] == 7).all()
            assert (out[:, :, 26:] == 7).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("group", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (4, torch.float16), (7, torch.float32)])
def test_merge_is_one_softmax(in_triton, dim, group, dtype):
    """Compared in float64, with scores of about 20 and queries that see no sink apart, some, or all."""
    streams, heads, tokens, sinks, gap, scaling = 2, 1, 19, 4, -3, dim**-0.5
    for rotation in (layouts(dim)[0], layouts(dim)[1], None)[: 3 if dim == 80 else 1]:
        query = 3 * drawn(streams, tokens, heads * group, dim, dtype=dtype).transpose(1, 2).unflatten(1, (heads, group))
        keys, values = 3 * drawn(streams, heads, sinks, dim, dtype=dtype, seed=1), drawn(streams, heads, sinks, dim, dtype=dtype)
        near, log_sum = drawn(*query.shape, dtype=dtype, seed=2), 3 * drawn(*query.shape[:4], seed=3)
        factors = None if rotation is None else rotation.factors(torch.arange(60, 60 + tokens, device=DEVICE), dtype, 200)
        turned = (
            query.double()
            if rotation is None
            else rotate(rotation.pair(query).double().contiguous(), factors.to(torch.complex128))
        )
        far = turned @ keys.double()[:, :, None].mT * scaling
        seen = torch.arange(sinks, device=DEVICE) < torch.arange(gap, gap + tokens, device=DEVICE)[:, None]
        share = torch.cat([log_sum.double()[..., None], far.masked_fill(~seen, -torch.inf)], -1).softmax(-1)
        expected = share[..., :1] * near.double() + share[..., 1:] @ values.double()[:, :, None]
        assert far.abs().max() > 15
        given, halves = rope.pairing(rotation, query)
        found = rope.merge(near.clone(), log_sum, given, factors, halves, keys, values, gap, scaling)
        close = max(ROUNDING[dtype], 1e-5)
        torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)


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
    """NLLs, kept tokens and later steps are equal. FlexAttention is uncompiled."""
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
