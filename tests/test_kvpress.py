"""Our policies beside kvpress' own presses, run as contestants in one loop (`make peers`, which installs kvpress)."""

from dataclasses import replace

import pytest
import torch
from helpers import CacheConfig, Model, adopt, decoder, nll, tiny_model

from kvbench.harness.core.parameters import policy_from
from kvbench.harness.engine.method import EAGER, OwnLoop
from kvbench.policies import CacheView

pytest.importorskip("kvpress", reason="`make peers` installs it beside an older transformers")
PROMPT, LATER, KEPT = 128, 40, 80  # with other numbers kvpress rounds budgets of layers and partitions otherwise
SNAP, OUR_SNAP = {"name": "kvpress:SnapKVPress", "window_size": 16}, {"name": "snapkv", "window": 16, "variant": "kvpress"}
ROWS = [  # a press with its parameters, and the policy of ours that bears its name
    ("StreamingLLMPress", {}, "sink_window", {"sinks": 4}),
    ("SnapKVPress", {"window_size": 16}, "snapkv", {"window": 16, "variant": "kvpress"}),
    ("PyramidKVPress", {"window_size": 16}, "pyramidkv", {"variant": "kvpress", "score": OUR_SNAP}),
    ("TOVAPress", {}, "tova", {"variant": "kvpress"}),
    ("ObservedAttentionPress", {"attention": "eager"}, "h2o", {"window": 0, "normalise": "visible"}),
    ("KnormPress", {}, "knorm", {}),
    ("KeyDiffPress", {}, "keydiff", {}),
    ("LagKVPress", {"lag_size": 16}, "lagkv", {"lag": 16}),
    ("CURPress", {}, "cur", {}),
    ("ExpectedAttentionPress", {}, "expected_attention", {}),
    ("ExpectedAttentionPress", {"use_vnorm": False}, "expected_attention", {"value_norm": False}),
    ("CriticalKVPress", {"press": SNAP}, "criticalkv", {"epsilon": 2e-4 * 16, "score": OUR_SNAP}),
    ("MergingPress", {"press": {"name": "kvpress:KnormPress"}}, "merging", {"score": "knorm"}),
    ("MergingPress", {"press": SNAP, "similarity_threshold": 0.4}, "merging", {"score": OUR_SNAP, "threshold": 0.4}),
    ("ChunkKVPress", {"press": SNAP, "chunk_length": 16}, "chunkkv", {"chunk": 16, "score": OUR_SNAP, "variant": "kvpress"}),
    (
        "SimLayerKVPress",
        {"lazy_threshold": 0.5, "n_recent": 32},
        "simlayerkv",
        {"threshold": 0.5, "recent": 32, "variant": "kvpress"},
    ),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return adopt(tiny_model("llama", vocab_size=512))


def after_prompt(model: Model, wanted: CacheConfig, tokens: torch.Tensor, attention: str = "") -> torch.Tensor:
    """NLLs of what follows the prompt, token by token."""
    read = decoder(model, wanted, len(tokens), replace(EAGER, own_loop=OwnLoop(attention)))
    logits = [read.read_prompt(tokens[:, :PROMPT], PROMPT)[:, None]]
    logits += [read(tokens[:, t : t + 1]) for t in range(PROMPT, PROMPT + LATER)]
    return nll(torch.cat(logits, 1), tokens[:, PROMPT - 1 :])


@pytest.mark.parametrize(("press", "parameters", "policy", "given"), ROWS)
def test_a_press_equals_our_policy_of_that_name(model, press, parameters, policy, given):
    """NLLs after a prompt that is cut once are equal. A different kept token would change them."""
    ours = policy_from(policy, given)
    tokens = torch.randperm(512, generator=torch.Generator().manual_seed(0))[None, : PROMPT + LATER]  # equal ones would tie
    ratio = {} if "press" in parameters or ours.outcome else {"compression_ratio": 1 - KEPT / PROMPT}
    if "press" in parameters:
        parameters = {**parameters, "press": {**parameters["press"], "compression_ratio": 1 - KEPT / PROMPT}}
    theirs = CacheConfig(policy_from(f"kvpress:{press}", parameters | ratio), positions="stream")
    found = after_prompt(model, theirs, tokens, parameters.get("attention", ""))
    expected = after_prompt(model, CacheConfig(ours, None if ours.outcome else KEPT, "stream", evict="prompt"), tokens)
    assert (found - expected).abs().max() < 3e-4
    assert abs(found.mean() - expected.mean()) < 1e-5


def test_cam_equals_their_press(model, monkeypatch):
    """NLLs with one KV head, since the press evicts equal tokens in all heads, and with a coin that both decide alike."""
    monkeypatch.setattr(torch, "bernoulli", lambda probability: (probability > 0.5).to(probability))
    monkeypatch.setattr(CacheView, "uniform", lambda view: torch.full(view.rank.shape, 0.5))
    one_head, tokens = adopt(tiny_model("llama", vocab_size=512, num_key_value_heads=1)), torch.arange(100)[None]
    press = {"base_press": {"name": "kvpress:KnormPress"}, "compression_interval": 1, "target_size": 24, "merge_budget": 8}
    theirs = CacheConfig(policy_from("kvpress:CAMPress", press), positions="stream")
    ours = CacheConfig(policy_from("cam", {"score": "knorm", "spread": 8}), 24, "stream")
    dropped = CacheConfig(policy_from("knorm", {}), 24, "stream")
    losses = []
    for config in (theirs, ours, dropped):
        read = decoder(one_head, config, 1, replace(EAGER, own_loop=OwnLoop("")))
        first = read.read_prompt(tokens[:, :1], 1)[:, None] if config is theirs else read(tokens[:, :1])
        losses.append(nll(torch.cat([first, *(read(tokens[:, t : t + 1]) for t in range(1, 100))], 1), tokens))
    assert (losses[1] - losses[0]).abs().max() < 3e-4
    assert (losses[1] - losses[2]).abs().max() > 0.1
