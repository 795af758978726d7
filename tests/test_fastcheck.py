"""Choosing the fastest way of reading that agrees with the plain walk, and filling caches for it with random K and V."""

from __future__ import annotations

import pytest
import torch
from conftest import model_of, tokens_of

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, FASTEST, PLAIN_WALK
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window


def filled(config: CacheConfig, tokens: int, family: str = "llama", method=EAGER, seed: int = 0) -> CachedDecoder:
    read = CachedDecoder(model_of(family), config, 2, method)
    read.fill_randomly(tokens, seed)
    return read


@pytest.mark.parametrize("tokens", [5, 20, 21, 50, 300], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize("config", [CacheConfig(SinkWindow(4), 20), CacheConfig(Window(), 20), CacheConfig(Dense())], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_filled_decoder_is_in_the_state_of_one_that_has_read(family, config, tokens):
    """The same ranks, positions and free slots, where a policy says beforehand what it keeps."""
    read, ours = CachedDecoder(model_of(family), config, 2), filled(config, tokens, family)
    read(tokens_of(tokens, 2))
    for theirs, slots in zip((w.slots.tensors for w in read.walks), (w.slots.tensors for w in ours.walks), strict=True):
        held = theirs.rank < theirs.rank.shape[1]
        assert torch.equal(slots.rank, theirs.rank)
        assert torch.equal(slots.free, theirs.free)
        assert torch.equal(slots.position[held], theirs.position[held])
        assert slots.keys[held].std() > 0.9
        assert not slots.keys[~held].any()
    assert ours.kept() == read.kept()
    assert (ours._seen, ours._max_seen, ours.slots) == (read._seen, read._max_seen, read.slots)
    assert torch.equal(ours._step, read._step)


@pytest.mark.parametrize("policy", [H2O(), Random()], ids=lambda p: type(p).__name__)
def test_a_filled_cache_is_full_where_what_is_kept_depends_on_the_tokens(policy):
    """As many slots, every rank once, one free slot with the rank of an empty one, no position twice."""
    config = CacheConfig(policy, 12)
    read, ours = CachedDecoder(model_of("llama"), config, 2), filled(config, 40)
    read(tokens_of(40, 2))
    for tensors in (d.walks[0].slots.tensors for d in (read, ours)):
        assert tensors.rank.sort(-1).values.tolist() == [[*range(12), 13]] * len(tensors.rank)
        assert (tensors.flat_rank[tensors.free] == 13).all()
    for row in (row for layer in ours.kept() for stream in layer for row in stream):
        assert len(set(row)) == 12
        assert max(row) == 39
    states = list(ours.walks[0].slots.tensors.states.values())
    assert len(states) == len(policy.statistics)
    for state in states:
        assert len(state.unique()) == state.numel() - len(state) + 1  # of the free slots alone it is the initial one
    assert (ours._seen, ours.slots) == (read._seen, read.slots)


@pytest.mark.parametrize("config", [CacheConfig(H2O(), 20), CacheConfig(SinkWindow(4), 20), CacheConfig(Dense())], ids=str)
def test_fast_and_plain_agree_from_a_filled_cache(config):
    fast, plain = filled(config, 50, method=FASTEST), filled(config, 50, method=PLAIN_WALK)
    for block in tokens_of(26, 2).split([20, 1, 1, 1, 1, 1, 1], 1):
        torch.testing.assert_close(fast(block), plain(block), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()
    other = filled(config, 50, method=PLAIN_WALK, seed=1)
    assert not torch.equal(other.walks[0].slots.tensors.keys, plain.walks[0].slots.tensors.keys)


def test_only_an_empty_decoder_can_be_filled():
    read = filled(CacheConfig(H2O(), 20), 50)
    with pytest.raises(ValueError, match="has read nothing"):
        read.fill_randomly(50)
