"""Blocks on CUDA: kernels that pair, rotate and merge, in Triton's interpreter; and what needs none, on a CPU.

The latter is FlexAttention, the merge with sinks, and PyTorch's attention.
"""

import pytest
import torch
from factories import needs_triton
from helpers import DEVICE, CacheConfig, CachedDecoder, SinkWindow, Window, model_of, nll, tokens_of
from torch.nn.attention.bias import CausalBias

from kvbench.harness.engine import attention, banded
from kvbench.harness.engine.attention import Terms, causal
from kvbench.harness.engine.banded import Sinks
from kvbench.harness.engine.method import TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.rotary import Rotation, _candidates, rotate
from kvbench.harness.kernels import flex, rope
from kvbench.harness.kernels.flex_blocks import banded_by_flex

DIMS = [8, 80, 128] if DEVICE.type == "cpu" else [8, 64, 80, 96, 128, 256]  # the interpreter takes seconds


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setattr(rope, "_DEVICES", {DEVICE.type})


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layouts(dim: int) -> list[Rotation]:
    """Half-split and interleaved pairs of all dims, of the first half and of the last half of the dims."""
    tables = [torch.rand(pairs, generator=torch.Generator().manual_seed(pairs)) for pairs in (dim // 2, dim // 4)]
    return list(_candidates(dim, tables, DEVICE))


@needs_triton
@pytest.mark.slow("Triton's interpreter")
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


@needs_triton
@pytest.mark.slow("Triton's interpreter")
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


@needs_triton
@pytest.mark.slow("Triton's interpreter")
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


TERMS = Terms(0.25)


def drawn_on_cpu(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("tokens", [128, 384])
@pytest.mark.parametrize("before", [0, 1, 77, 128, 300])
@pytest.mark.parametrize("window", [1, 127, 128, 300, 1000])
def test_the_block_mask_lists_the_tiles_of_the_band(tokens, before, window):
    """Tiles that a query sees in part are masked key by key; whole ones are not; others are skipped."""
    length = flex.whole_tiles(before + tokens)
    mask = flex._block_mask(tokens, length, before, window, torch.device("cpu"))
    age = before + torch.arange(tokens)[:, None] - torch.arange(length)
    seen = (age >= 0) & (age <= window)
    tiles = seen.unflatten(1, (-1, flex.TILE)).unflatten(0, (-1, flex.TILE)).transpose(1, 2).flatten(2)
    whole, part = tiles.all(-1), tiles.any(-1) & ~tiles.all(-1)
    for expected, number, index in (
        (part, mask.kv_num_blocks, mask.kv_indices),
        (whole, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        listed = [set(row[:count]) for row, count in zip(index[0, 0].tolist(), number[0, 0].tolist(), strict=True)]
        assert listed == [set(row.nonzero()[:, 0].tolist()) for row in expected]
    at = torch.arange(tokens)[:, None], torch.arange(length)
    assert torch.equal(mask.mask_mod(None, None, *at), seen)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("padded", [False, True])
def test_padding_changes_nothing(monkeypatch, padded):
    """Keys are padded here or by the caller, whose padding may hold any finite number."""
    monkeypatch.setattr(flex, "_DEVICES", {"cpu"})
    query, keys, values = drawn_on_cpu(2, 2, 2, 128, 16), drawn_on_cpu(2, 2, 205, 16, seed=1), drawn_on_cpu(2, 2, 205, 16, seed=2)
    expected = banded._with_all_scores(query, keys, values, banded._band(128, 77, 60, keys.device), None, None, TERMS)
    padding = 51 if padded else 0
    if padded:
        keys, values = (torch.cat([x, torch.full((2, 2, padding, 16), 1e3)], 2) for x in (keys, values))
    out = banded_by_flex(query, keys, values, 60, None, TERMS, 0, padding)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dim", "supported"), [(8, False), (15, False), (16, True), (80, True), (256, True), (264, False)])
def test_heads_that_inductor_refuses_are_not_given_to_it(monkeypatch, dim, supported):
    """stories260K has 8 dims; inductor raises below 16, and has no configuration above 256."""
    monkeypatch.setattr(flex, "_DEVICES", {"cpu"})
    query = torch.empty(1, 1, 1, 128, dim)
    assert flex.can_be_flex(query, query[:, :, 0], TERMS) == supported


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_sinks_are_not_rounded_to_16_bits(dtype):
    """With scores of about 20, rounding them to bfloat16 changes a sink's share by some 5 %."""
    tokens, scaling = 300, 0.3
    toward = torch.nn.functional.normalize(drawn_on_cpu(64), dim=0)
    query = (8 * toward + drawn_on_cpu(1, 2, 2, tokens, 64, seed=3) / 8).to(dtype)
    keys = (20 / (8 * scaling) * toward + drawn_on_cpu(1, 2, 3, 64, seed=4) / 8).to(dtype)
    values, near = drawn_on_cpu(1, 2, 3, 64, dtype=dtype, seed=1), drawn_on_cpu(1, 2, 2, tokens, 64, dtype=dtype, seed=2)
    outside = torch.arange(3) < torch.arange(-2, tokens - 2)[:, None]
    far = (query.double() @ keys.double()[:, :, None].mT * scaling).masked_fill(~outside, -torch.inf)
    log_sum = far[..., 2].clamp(min=15).float()
    assert 15 < far[..., 10:, :].mean() < 25
    share = torch.cat([log_sum.double()[..., None], far], -1).softmax(-1)
    expected = share[..., :1] * near.double() + share[..., 1:] @ values.double()[:, :, None]
    out = banded.merged(near, log_sum, Sinks(query, keys, values), outside, Terms(scaling))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


class Asked:
    """Stands in for PyTorch's attention: notes what it is asked, and answers in plain float64."""

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool, bool]] = []  # a mask of scores, the causal one, groups

    def __call__(self, query, keys, values, mask=None, *, is_causal=False, scale=None, enable_gqa=False):
        is_bias = isinstance(mask, CausalBias)
        self.calls.append((mask is not None and not is_bias, is_bias or is_causal, enable_gqa))
        assert enable_gqa or query.shape[1] == keys.shape[1]
        keys, values = (x.repeat_interleave(query.shape[1] // keys.shape[1], 1) for x in (keys, values))
        tokens, length = query.shape[2], keys.shape[2]
        if is_bias or is_causal:
            mask = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
        scores = (query.double() @ keys.double().mT * scale).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ values.double()).to(query.dtype)


@pytest.mark.parametrize(("dtype", "group"), [(torch.bfloat16, 4), (torch.float32, 1)], ids=str)
@pytest.mark.parametrize("length", [40, 90])
@pytest.mark.parametrize("kind", ["plain", "sliding window", "padding"])
def test_grouped_heads_stay_in_the_fused_kernels(monkeypatch, dtype, group, length, kind):
    """On CUDA no call has both a mask and groups, which no fused kernel takes; only FlashAttention (16 bits) gets groups."""
    query = drawn_on_cpu(2, 3, group, 40, 16, dtype=dtype)
    keys, values = drawn_on_cpu(2, 3, length, 16, dtype=dtype, seed=1), drawn_on_cpu(2, 3, length, 16, dtype=dtype, seed=2)
    terms = TERMS._replace(sliding_window=20) if kind == "sliding window" else TERMS
    padding = torch.tensor([0, 5]) if kind == "padding" else None
    expected = causal(query, keys, values, terms, padding)
    asked = Asked()
    monkeypatch.setattr(attention, "_CUDA", {"cpu"})
    monkeypatch.setattr(attention, "scaled_dot_product_attention", asked)
    found = causal(query, keys, values, terms, padding)
    close = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 0}
    torch.testing.assert_close(found, expected, **close)
    groups = kind == "plain" and group > 1 and dtype == torch.bfloat16
    assert set(asked.calls) == {(kind != "plain", kind == "plain", groups)}
