"""CUDA's blocks besides kernels of our own, on a CPU: FlexAttention, the merge with sinks, and PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from kvbench.harness.engine import attention, banded
from kvbench.harness.engine.attention import Terms, causal
from kvbench.harness.engine.banded import Sinks
from kvbench.harness.kernels import flex
from kvbench.harness.kernels.flex_blocks import banded_by_flex

TERMS = Terms(0.25)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
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
    query, keys, values = drawn(2, 2, 2, 128, 16), drawn(2, 2, 205, 16, seed=1), drawn(2, 2, 205, 16, seed=2)
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
    toward = torch.nn.functional.normalize(drawn(64), dim=0)
    query = (8 * toward + drawn(1, 2, 2, tokens, 64, seed=3) / 8).to(dtype)
    keys = (20 / (8 * scaling) * toward + drawn(1, 2, 3, 64, seed=4) / 8).to(dtype)
    values, near = drawn(1, 2, 3, 64, dtype=dtype, seed=1), drawn(1, 2, 2, tokens, 64, dtype=dtype, seed=2)
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
    query = drawn(2, 3, group, 40, 16, dtype=dtype)
    keys, values = drawn(2, 3, length, 16, dtype=dtype, seed=1), drawn(2, 3, length, 16, dtype=dtype, seed=2)
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
