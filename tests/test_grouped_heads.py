"""Which of PyTorch's attention kernels causal attention asks for, where query heads share KV heads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from kvbench.harness.engine import attention
from kvbench.harness.engine.attention import Terms, causal

TERMS = Terms(0.25)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
