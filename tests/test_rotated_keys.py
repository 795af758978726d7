"""With positions `stream`, slots hold keys rotated, unless the policy compares keys: the numbers are those of unrotated ones."""

from __future__ import annotations

import pytest
import torch
from conftest import model_of, nll, tokens_of
from factories import MODES

from kvbench.harness.engine.budgets import Layout
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, FASTEST, KERNELS, TOKEN_BY_TOKEN
from kvbench.harness.engine.rotary import rotate
from kvbench.policies import KeyNorm, Policy
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.knorm import Knorm
from kvbench.policies.lagkv import LagKV
from kvbench.policies.leverage import Leverage
from kvbench.policies.rkv import RKV
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.snapkv import SnapKV

WAYS = {
    "token by token": (H2O(), 1, TOKEN_BY_TOKEN),
    "runs": (H2O(), 5, EAGER),
    "closed form": (SinkWindow(3), 1, EAGER),
    "compiled walk": (H2O(), 1, KERNELS),
    "filled": (Dense(), 1, FASTEST),
    "written statistic": (Knorm(), 1, FASTEST),
    "cut once": (SnapKV(window=4, kernel=3), "prompt", FASTEST),
}
BY_WAY = pytest.mark.parametrize(("policy", "evict", "method"), WAYS.values(), ids=WAYS)
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


@BY_WAY
def test_a_key_is_rotated_to_its_position_however_it_came_in(policy, evict, method):
    """In the first layer, a token's unrotated key is the same whatever is kept: that of a dense cache."""
    model, tokens = model_of("llama"), tokens_of(PROMPT + 26)
    dense, read = CachedDecoder(model, CacheConfig(Dense())), CachedDecoder(model, config_of(policy, evict), 1, method)
    logits_of(read, tokens)
    dense(tokens)
    keys, rotation = dense.walks[0].rows(tokens.shape[1], 0).keys, model.layers[0].rotation
    rows = read.walks[0].rows(read.walks[0].slots.num_slots, 0)
    assert rows.keys_rotated
    for head, (rank, position) in enumerate(zip(rows.rank, rows.position, strict=True)):
        held = rank < rows.rank.shape[1]
        expected = rotate(keys[head, position[held]], rotation.factors(position[held], keys.dtype, 100))
        torch.testing.assert_close(rows.keys[head, held], expected)


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


@pytest.mark.parametrize("mode", MODES)
def test_only_an_angle_that_never_changes_is_applied_once(mode):
    read = CachedDecoder(model_of("llama"), config_of(H2O(), 1, mode))
    assert [w.slots.keys_rotated for w in read.walks] == [mode == "stream"]
