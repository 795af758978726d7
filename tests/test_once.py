"""One eviction after a prompt: compared with lists that are cut once, and with dense if nothing is cut."""

from __future__ import annotations

import pytest
import torch
from conftest import model_of, tokens_of
from factories import CLOSE, POLICIES, SETTINGS, chooser
from reference import ListBackend
from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow


def read_once(model: Model, config: CacheConfig, tokens: Tensor, block: int, method: Method = EAGER):
    """A decoder that has read a prompt, and its logits."""
    read = CachedDecoder(model, config, tokens.shape[0], method)
    return read, read.read_prompt(tokens, block, once=True)


@SETTINGS
def test_a_prompt_cut_once_and_what_follows_equal_the_lists(family, policy, mode):
    dtype = torch.float64
    model, tokens, capacity, limit, length = model_of(family, dtype), tokens_of(40), 9, 12, 30
    reference = ListBackend(model, chooser(policy, capacity, 5), capacity, mode, limit, first_eviction=length - 1)
    theirs = reference.run(tokens)
    config = CacheConfig(policy, capacity, mode, limit, seed=5)
    read, logits = read_once(model, config, tokens[:, :length], 7)
    torch.testing.assert_close(logits, theirs[:, length - 1], atol=CLOSE[dtype], rtol=0)
    for t in range(length, 40):
        assert [layer[0] for layer in read.kept()] == reference.kept[t - 1], f"before step {t}"
        ours = read(tokens[:, t : t + 1])
        torch.testing.assert_close(ours, theirs[:, t : t + 1], atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("method", [EAGER, FASTEST])
def test_the_block_the_streams_and_kernels_change_nothing(policy, method):
    model, tokens, config = model_of("llama"), tokens_of(90, streams=2), CacheConfig(policy, 16)
    reads = [read_once(model, config, tokens[b : b + 1, :80], 80, TOKEN_BY_TOKEN)[0] for b in range(2)]
    both, _ = read_once(model, config, tokens[:, :80], 33, method)
    assert both.kept() == [[a, b] for a, b in zip(*([layer[0] for layer in r.kept()] for r in reads), strict=True)]
    ours, theirs = both(tokens[:, 80:]), torch.cat([r(tokens[b : b + 1, 80:]) for b, r in enumerate(reads)])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert both.slots == reads[0].slots


@pytest.mark.parametrize("config", [CacheConfig(Dense()), CacheConfig(H2O(), 60), CacheConfig(SinkWindow(), 60)], ids=str)
def test_what_covers_the_prompt_is_dense(config):
    model, tokens = model_of("llama"), tokens_of(60)
    read, logits = read_once(model, config, tokens[:, :50], 16)
    dense = CachedDecoder(model, CacheConfig(Dense()))(tokens)
    torch.testing.assert_close(logits, dense[:, 49], atol=1e-4, rtol=0)
    torch.testing.assert_close(read(tokens[:, 50:]), dense[:, 50:], atol=1e-4, rtol=0)


def test_a_sliding_window_layer_keeps_what_later_queries_may_see():
    model, tokens = model_of("mistral"), tokens_of(60)
    sliding = model.layers[0].sliding_window
    assert sliding == 16
    read, _ = read_once(model, CacheConfig(SinkWindow(sinks=2), 20), tokens[:, :50], 16)
    kept = read.kept()[0][0][0]
    assert min(kept) >= 50 - (sliding - 1)
    assert read(tokens[:, 50:]).isfinite().all()
