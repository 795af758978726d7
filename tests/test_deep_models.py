"""The check of shortcuts on a deep model with massive activations, whose logits depend chaotically on rounding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
import torch
from factories import needs_compiler
from helpers import DEVICE, H2O, CacheConfig, Dense, Model, SinkWindow, adopt, tiny_model

from kvbench.harness.core.codec import Codec
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.method import FASTEST, PLAIN_WALK
from kvbench.harness.engine.shortcuts import Shortcuts
from kvbench.harness.engine.trial import MethodCheck
from kvbench.harness.engine.walk import Walk

SINKS, LOOKS = CacheConfig(SinkWindow(4), 40), CacheConfig(H2O(), 40)
CODED = CacheConfig(Dense(), kv=Codec("int4"))
RUNS = CacheConfig(SinkWindow(4), 40, evict=16)
BY_KERNEL = replace(PLAIN_WALK, step_kernel=True)

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def chaotic() -> Model:
    """30 layers; one channel of the inputs of each is much larger than the others."""
    hf = tiny_model("llama", num_hidden_layers=30, initializer_range=0.2, hidden_size=64)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.input_layernorm.weight[3] = 20.0
    return adopt(hf.to(DEVICE))


@pytest.mark.parametrize(
    ("config", "blocks", "step"),
    [(SINKS, "closed form", "compiled"), (LOOKS, "compiled walk", "compiled"), (CODED, "walk", "compiled")],
    ids=["closed form", "compiled walk", "coded"],
)
def test_right_code_is_accepted_though_its_logits_differ(chaotic, config, blocks, step):
    check = fast_method(chaotic, config)
    assert (check.blocks, check.step, check.refused) == (blocks, step, "")
    assert 0 < check.differs < 1
    if config is SINKS:
        bench = MethodCheck(chaotic, config, 1)
        (error,) = bench._differences([bench._decoder(PLAIN_WALK), bench._decoder(FASTEST)], [16, 64, 1])
        assert error > 1


def fault(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    layers: Sequence[int] = (17,),
    tokens: slice = slice(None),
    times: float = inf,
) -> None:
    """Make one head of some layers wrong by a thousandth, in some tokens of each layer's first calls."""
    right, calls = getattr(owner, name), Counter()

    def wrong(self, plan, at, *given):
        out = right(self, plan, at, *given)
        calls[at] += 1
        if at in layers and calls[at] <= times:
            out[:, 1, tokens] *= 1.001
        return out

    monkeypatch.setattr(owner, name, wrong)


@pytest.mark.parametrize(
    ("config", "owner", "name"),
    [
        (SINKS, Shortcuts, "attend_in_band"),
        (LOOKS, Shortcuts, "walk_by_kernel"),
        (LOOKS, Walk, "_step_by_kernel"),
        (CODED, Walk, "_step_by_kernel"),
        (RUNS, Shortcuts, "read_runs"),
    ],
    ids=["closed form", "compiled walk", "step kernels", "steps of a coded cache", "runs"],
)
def test_a_thousandth_in_one_head_of_one_layer_is_refused(monkeypatch, chaotic, config, owner, name):
    check = MethodCheck(chaotic, config, 1)
    fault(monkeypatch, owner, name)
    if config is RUNS:
        refused = check.trial_of_runs()
    else:
        refused = (check.trial_of_codes(BY_KERNEL) if config is CODED else check.trial(FASTEST)).refused
    assert refused == "its attention differs from the plain walk's"
    assert check.max_error > 1


@pytest.mark.parametrize(
    ("layers", "tokens", "times", "refused"),
    [
        ((17,), slice(3), 2, ""),
        ((17,), slice(3), inf, "its attention differs from the plain walk's"),
        ((17,), slice(None), 2, "its attention differs from the plain walk's"),
        (range(24), slice(3), 2, "its attention differs from the plain walk's"),
    ],
    ids=["some tokens of the first text", "of every text", "whole blocks", "in many layers"],
)
def test_swapped_evictions_are_errors_of_few_tokens_in_few_heads(monkeypatch, chaotic, layers, tokens, times, refused):
    """A swap of two evictions changes attention in the block alone. The first comparison reads two blocks by the kernel."""
    fault(monkeypatch, Shortcuts, "walk_by_kernel", layers, tokens, times)
    check = MethodCheck(chaotic, LOOKS, 1)
    assert check.trial(FASTEST).refused == refused
    assert (check.max_error > 1) == bool(refused)
