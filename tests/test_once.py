"""Eviction once after a prompt, compared with lists that are cut once; and resets, which evict a full cache as a whole."""

import pytest
import torch
from factories import CLOSE, POLICIES, SETTINGS, chooser
from helpers import DEVICE, FAMILIES, CacheConfig, CachedDecoder, Model, SinkWindow, decoder, in_blocks, model_of, tokens_of
from reference import ListBackend
from torch import Tensor

from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.engine.reset import ResetDecoder
from kvbench.policies.reset import Reset


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


def test_a_sliding_window_layer_keeps_what_later_queries_may_see():
    model, tokens = model_of("mistral"), tokens_of(60)
    sliding = model.layers[0].sliding_window
    assert sliding == 16
    read, _ = read_once(model, CacheConfig(SinkWindow(sinks=2), 20), tokens[:, :50], 16)
    kept = read.kept()[0][0][0]
    assert min(kept) >= 50 - (sliding - 1)
    assert read(tokens[:, 50:]).isfinite().all()


CAPACITY = 9
POLICIES = [Reset(), Reset(reread=0), Reset(reread=CAPACITY), Reset(sinks=2, reread=3), Reset(sinks=2), Reset(sinks=3, reread=6)]


def naive(family: str, text: torch.Tensor, policy: Reset, capacity: int = CAPACITY) -> torch.Tensor:
    """Return the logits of the model itself for the tokens since the last reset, called anew for every token of a stream."""
    policy, cached, logits = policy.bind(capacity), [], []
    for t, token in enumerate(text[0].tolist()):
        if len(cached) > capacity:
            cached = text[0, : policy.sinks].tolist() + text[0, t - policy.reread : t].tolist()
        cached.append(token)
        with own_attention(model_of(family).hf), torch.inference_mode():
            logits.append(model_of(family).hf(input_ids=torch.tensor([cached], device=DEVICE), use_cache=False).logits[:, -1])
    return torch.stack(logits, 1)


def config_of(policy: Reset, capacity: int = CAPACITY) -> CacheConfig:
    return CacheConfig(policy, capacity)


@pytest.mark.parametrize("size", [1, 7, 48])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_it_equals_the_models_own_forward_pass_over_the_tokens_since_the_last_reset(policy, size):
    """Step by step, and in blocks that hold no, one and several resets."""
    tokens = tokens_of(48)
    ours = in_blocks(decoder(model_of("llama"), config_of(policy)), tokens, size)
    torch.testing.assert_close(ours, naive("llama", tokens, policy), atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("size", [1, 8])
def test_streams_of_unequal_length_equal_each_alone(policy, size):
    """They are reset at different steps."""
    model, tokens = model_of("llama", torch.float64), tokens_of(48, 3)
    valid = torch.rand(3, 48, generator=torch.Generator().manual_seed(2)) < torch.tensor([[1.0], [0.6], [0.2]])
    valid = valid.to(DEVICE)
    read = decoder(model, config_of(policy), 3)
    together = torch.cat([read(t, v) for t, v in zip(tokens.split(size, 1), valid.split(size, 1), strict=True)], 1)
    for b in range(3):
        alone = decoder(model, config_of(policy))
        logits = in_blocks(alone, tokens[b : b + 1, valid[b]], 5)
        torch.testing.assert_close(together[b][valid[b]], logits[0], atol=1e-5, rtol=0)
        seen = range(int(valid[b].sum()))
        assert read.fork([b]).held(seen) == alone.held(seen)


def test_a_fork_goes_its_own_way():
    tokens, other, model = tokens_of(30), tokens_of(60)[:, 30:], model_of("llama")
    read = decoder(model, config_of(Reset(reread=4)))
    in_blocks(read, tokens, 30)
    fork = read.fork([0, 0])
    theirs = in_blocks(fork, other.expand(2, -1), 4)
    ours = in_blocks(read, other, 4)
    torch.testing.assert_close(theirs, ours.expand(2, -1, -1), atol=1e-5, rtol=0)
    assert fork.kv_bytes == 2 * read.kv_bytes == 2 * model.kv_bytes(CAPACITY)


def test_what_is_held_and_when_it_goes():
    """After `capacity + 1` tokens the next one empties the cache and follows those that are read again."""
    read = decoder(model_of("llama"), config_of(Reset(sinks=1, reread=3)))
    assert isinstance(read, ResetDecoder)
    used, left = [], []
    for token in tokens_of(24).split(1, 1):
        left.append(read.steps_to_reset)
        read(token)
        used.append(read.slots[0])
    assert used == [*range(1, 11), *range(5, 11), *range(5, 11), 5, 6]
    assert left == [*range(10, -1, -1), *range(5, -1, -1), *range(5, -1, -1), 5][:24]
    assert [p for p in range(26) if read.held([p])] == [0, 19, 20, 21, 22, 23]
    assert read.held_bytes == 6 / 10 * read.kv_bytes


ODD = ["gemma2", "gpt_oss", "mistral", "smollm3"]  # softcaps, sink logits, a sliding window of 16, layers without RoPE


@pytest.mark.parametrize("family", dict.fromkeys([*FAMILIES, *ODD]))
def test_it_does_so_in_every_kind_of_family(family):
    tokens, policy = tokens_of(60), Reset(sinks=2, reread=8)
    ours = in_blocks(decoder(model_of(family), config_of(policy, 24)), tokens, 13)
    torch.testing.assert_close(ours, naive(family, tokens, policy, 24), atol=1e-4, rtol=0)
