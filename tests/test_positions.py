"""Positions: keys that slots hold rotated have the numbers of unrotated ones; and models that learned their positions."""

import pytest
import torch
from helpers import H2O, CacheConfig, Dense, SinkWindow, SnapKV, Window, adopt, model_of, nll, tiny_model, tokens_of

from kvbench.harness.engine.budgets import Layout
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, FASTEST, KERNELS, TOKEN_BY_TOKEN
from kvbench.harness.engine.own_attention import attention_by
from kvbench.policies import KeyNorm, Policy
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.knorm import Knorm
from kvbench.policies.lagkv import LagKV
from kvbench.policies.leverage import Leverage
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.rkv import RKV

WAYS = {
    "token by token": (H2O(), 1, TOKEN_BY_TOKEN),
    "runs": (H2O(), 5, EAGER),
    "closed form": (SinkWindow(3), 1, EAGER),
    "compiled walk": (H2O(), 1, KERNELS),
    "filled": (Dense(), 1, FASTEST),
    "written statistic": (Knorm(), 1, FASTEST),
    "cut once": (SnapKV(window=4, kernel=3), "prompt", FASTEST),
}
PROMPT = 30  # tokens


class Peeks(Policy):
    """Looks at keys, but says nothing of it."""

    statistics = (KeyNorm(),)

    def importance(self, view):
        return view.state(KeyNorm()) + 0 * view.keys[..., 0]


def config_of(policy: Policy, evict, positions="stream") -> CacheConfig:
    return CacheConfig(policy, 12 if policy.evicts else None, positions, 9, seed=1, evict=evict)


def logits_of(read: CachedDecoder, tokens: torch.Tensor) -> torch.Tensor:
    """After the prompt and of what follows, in blocks and one by one."""
    first = read.read_prompt(tokens[:, :PROMPT], 13)[:, None]
    return torch.cat([first, *(read(x) for x in tokens[:, PROMPT:].split([16, 1, 1, 7, 1], 1))], 1)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("llama", way) for way in WAYS),
        *((family, way) for family in ("gpt_neox", "smollm3") for way in ("token by token", "closed form", "compiled walk")),
    ],
)
def test_rotated_keys_give_the_numbers_of_unrotated_ones(monkeypatch, family, way):
    """With all dims rotated, some of them, and none in some layers; and for a fork."""
    model, tokens, (policy, evict, method) = model_of(family), tokens_of(PROMPT + 26, 2), WAYS[way]
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "_compares_keys", lambda self: True)
        unrotated = CachedDecoder(model, config_of(policy, evict), 2, method)
        theirs = logits_of(unrotated, tokens)
    rotated = CachedDecoder(model, config_of(policy, evict), 2, method)
    ours = logits_of(rotated, tokens)
    assert [w.slots.keys_rotated for w in rotated.walks] == [w.slots.shape.rotation is not None for w in rotated.walks]
    assert not any(w.slots.keys_rotated for w in unrotated.walks)
    torch.testing.assert_close(nll(ours, tokens[:, PROMPT - 1 :]), nll(theirs, tokens[:, PROMPT - 1 :]), atol=1e-4, rtol=0)
    assert rotated.kept() == unrotated.kept()
    a, b = (read.fork([1, 0, 1])(tokens[[1, 0, 1], :3]) for read in (rotated, unrotated))
    torch.testing.assert_close(a, b, atol=2e-4, rtol=0)


@pytest.mark.parametrize("policy", [KeyDiff(), KeyDiff("unrotated"), Leverage(), RKV(window=3), Peeks(), LagKV(lag=16)], ids=str)
def test_a_policy_that_looks_at_keys_has_them_as_they_were_written(policy):
    """So tokens that come twice have equal keys in the first layer, however each came in."""
    model, tokens = model_of("llama"), tokens_of(70, 2)
    assert len(set(tokens[0].tolist())) < 70
    reads = [CachedDecoder(model, config_of(policy, 1), 2, method) for method in (FASTEST, TOKEN_BY_TOKEN)]
    logits = [torch.cat([read(x) for x in tokens.split([20, 30, 1, 19], 1)], 1) for read in reads]
    assert not any(w.slots.keys_rotated for read in reads for w in read.walks)
    torch.testing.assert_close(nll(logits[0], tokens), nll(logits[1], tokens), atol=1e-4, rtol=0)
    assert reads[0].kept() == reads[1].kept()


LENGTH, CAPACITY = 40, 12


@pytest.fixture(scope="module", params=["gpt2", "opt"])
def model(request):
    return adopt(tiny_model(request.param).double().cpu())


def own_logits(model, ids, mask=None):
    """The model's own forward pass. mask: which keys each query sees. [T, T] bool."""
    given = {"position_ids": torch.arange(ids.shape[1])[None]}
    if mask is not None:
        given["attention_mask"] = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)[None, None]
    with attention_by(model.hf, "eager"), torch.inference_mode():
        return model.hf(input_ids=ids, use_cache=False, **given).logits


@pytest.mark.parametrize("policy", [Window(), SinkWindow(2)])
@pytest.mark.parametrize("method", ["eager", "fastest"])
@pytest.mark.parametrize("block", [1, 7, LENGTH])
def test_evicting_is_masking(model, policy, method, block):
    ids = tokens_of(LENGTH).cpu()
    config = CacheConfig(policy, CAPACITY, positions="stream")
    read = decoder(model, config, 1, *([FASTEST] if method == "fastest" else []))
    ours = torch.cat([read(part) for part in ids.split(block, 1)], 1)
    now, then = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    sinks = getattr(policy, "sinks", 0)
    seen = (then <= now) & ((now - then <= CAPACITY - sinks) | (then < sinks))
    torch.testing.assert_close(ours, own_logits(model, ids, seen), atol=1e-6, rtol=0)


def test_each_window_of_recompute_begins_at_position_0(model):
    ids = tokens_of(LENGTH).cpu()
    ours = decoder(model, CacheConfig(RecomputeWindow(), CAPACITY))(ids)
    for end in (3, CAPACITY + 1, LENGTH):
        window = ids[:, max(0, end - CAPACITY - 1) : end]
        torch.testing.assert_close(ours[:, end - 1], own_logits(model, window)[:, -1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("policy", [H2O(), RecomputeWindow()])
def test_streams_of_unequal_length_are_each_read_as_if_alone(model, policy):
    ids = tokens_of(LENGTH, 2).cpu()
    config = CacheConfig(policy, CAPACITY, positions="stream")
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    valid[1, 5:9] = valid[1, 30:] = False
    both = decoder(model, config, 2)
    together = torch.cat([both(ids[:, part], valid[:, part]) for part in (slice(0, 20), slice(20, LENGTH))], 1)
    alone = decoder(model, config)(ids[1:, valid[1]])
    torch.testing.assert_close(together[1, valid[1]], alone[0], atol=1e-6, rtol=0)
