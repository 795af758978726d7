"""`bench audit` finds what is wrong with a cache, and nothing in caches that are right."""

import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
import wrong_caches
from helpers import bench, tiny_model
from test_foreign import skip_without_fp8
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, QuantizedCache, StaticCache
from watched import eager_weights
from wrong_caches import BUDGET

import kvbench
from kvbench.harness.audit import audit
from kvbench.harness.audit.audit import CHECKS, Audit
from kvbench.harness.core.errors import UserError

FAULTS = {  # a cache, and the checks that fail
    "Window": set(),
    "Ranked": {"padding"},  # as every cache with sinks: the padding becomes the sinks
    "NotRenumbered": {"positions", "length"},
    "RenumberedTwice": {"positions"},
    "SinksLostLater": {"sinks", "padding"},
    "EvictsOneTooMany": {"budget"},
    "WrongLength": {"length", "positions"},  # of which the model makes positions
    "KeepsViews": {"memory"},
    "ReordersKeysOnly": {"beams"},
    "IgnoresPadding": {"padding"},
    "EvictsNothing": {"eviction"},
    "SeedFromClock": {"determinism"},
    "ValuesOfOtherTokens": {"rows"},
    "Ring": {"order"},
    "ShiftedMask": {"blocks", "chunked_prefill", "second_turn", "padding"},
    "CropsNoLength": {"crop"},
    "CropsByTextIndex": {"crop"},
    "CropsWindowByLength": {"crop"},
    "ResetsNoLength": {"reset"},
    "Float32": {"bfloat16"},
    "SharedWithItsCopy": {"deep_copy"},
    "SecondBlockIsAPrompt": {"blocks", "chunked_prefill", "second_turn"},
    "PromptLongerThanBudget": {"short_prompts"},
    "OneOutPerCall": {"blocks", "chunked_prefill", "second_turn", "short_prompts"},
    "SinksOfTheFirstBlock": {"short_prompts", "padding"},
}


@cache
def model(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, vocab_size=512)


def only(name: str, cache: object, on: PreTrainedModel | str | None = None, **settings: object) -> Audit:
    """Audit by one check, after the check that the cache can be read."""
    return kvbench.audit(cache, on or model(), skip=[c.name for c in CHECKS if c.name not in ("reads", name)], **settings)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_check_and_by_no_other(name):
    result = kvbench.audit(getattr(wrong_caches, name), model(), budget=BUDGET)
    assert {check.name for check in result.failed} == FAULTS[name], f"{result}"


def static(config: PreTrainedConfig) -> StaticCache:
    return StaticCache(config, max_cache_len=96)


@pytest.mark.slow("about 20 runs of a model")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("cache", [DynamicCache, static])
def test_transformers_caches_pass(cache, family):
    """Gemma 3 has sliding-window layers, whose caches evict."""
    result = kvbench.audit(cache, model(family))
    assert result.ok, f"{result}"
    verdicts = {check.name: check.verdict for check in result.checks}
    assert {verdicts[name] for name in ("reads", "rows", "mask", "positions", "length", "padding", "second_turn")} == {"pass"}
    assert (verdicts["eviction"] == "pass") == (family != "llama")


@pytest.mark.slow("about 20 runs of a model")
def test_a_quantized_cache_passes_what_applies():
    """But for what transformers 5.23 does with its codes: `crop` and `batch_repeat_interleave` change uncoded tokens only."""
    skip_without_fp8()
    result = kvbench.audit(lambda config: QuantizedCache("fp8", config), model())
    assert {check.name for check in result.failed} <= {"crop", "repeat"}, f"{result}"
    assert "rounded by up to" in next(check.evidence for check in result.checks if check.name == "rows")


@pytest.mark.slow("about 20 runs of a model")
@pytest.mark.parametrize("policy", ["h2o", "sink_window", "dense"])
def test_policies_pass(policy):
    result = kvbench.audit(policy, model(), budget=None if policy == "dense" else BUDGET)
    assert result.ok, f"{result}"
    assert {check.name for check in result.checks if check.verdict == "pass"} >= {
        "blocks",
        "padding",
        "beams",
        "repeat",
        "deep_copy",
    }


def test_the_first_step_that_differs_from_a_policy():
    assert only("like", wrong_caches.Window, budget=BUDGET, like="window").ok
    (check,) = only("like", wrong_caches.SinksLostLater, budget=BUDGET, like="sink_window").failed
    assert check.evidence == "at step 18, layer 0, KV head 0 holds [5], and sink_window [0]"


@pytest.mark.parametrize(
    ("name", "declared", "verdict", "evidence"),
    [
        ("Window", 2, "fail", "at step 17, layer 0: token 0 of the first 2 "),
        ("Window", 0, "not applicable", "none are declared, and none survive"),
        ("IgnoresPadding", 4, "pass", "the first 4 tokens are held at every step"),
        ("IgnoresPadding", 0, "pass", "the first 4 tokens are held at every step; not declared"),
        ("SinksLostLater", 0, "fail", "at step 18, layer 0: token 0 of the first 4 "),
    ],
)
def test_sinks_that_are_not_declared_are_those_of_the_first_eviction(name, declared, verdict, evidence):
    check = only("sinks", getattr(wrong_caches, name), budget=BUDGET, sinks=declared).checks[-1]
    assert (check.verdict, check.evidence[: len(evidence)]) == (verdict, evidence)


def test_keys_that_hardly_turn_are_placed_exactly():
    """A distance of one token changes these keys by a hundredth, as those of some heads of trained models."""
    slow = deepcopy(model())
    for layer in slow.model.layers:
        weight = layer.self_attn.k_proj.weight.data.unflatten(0, (-1, 2, slow.config.head_dim // 2))
        weight[:, :, :-1] *= 1e-3  # all frequencies but the lowest
    assert only("positions", wrong_caches.Ranked, slow, budget=BUDGET).ok


def test_json_has_the_ranges_of_tokens_held_before_every_step():
    held = json.loads(only("eviction", wrong_caches.IgnoresPadding, budget=BUDGET).to_json())["held"]["llama"]
    assert held["8"] == [[[[0, 7]]] * 2] * 2
    assert held["64"] == [[[[0, 3], [52, 63]]] * 2] * 2


def test_the_mass_lost_is_that_of_the_tokens_not_held():
    """Full attention gives the tokens outside of a window this weight."""
    check = only("attention_mass", wrong_caches.Window, budget=BUDGET).checks[-1]
    tokens = 2 * BUDGET + 33
    ids = torch.randperm(512, generator=torch.Generator().manual_seed(0))[None, :tokens]
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    weights = torch.stack(eager_weights(model(), ids))[:, 0]  # [layers, query heads, tokens, tokens]
    lost = weights.masked_fill(age <= BUDGET, 0).sum(-1)[..., BUDGET + 1 :].mean()
    assert check.evidence.startswith(f"{lost:.1%} is lost after step 17, most in layer ")


def test_perplexity_is_that_of_full_attention_until_a_token_is_evicted():
    check = only("perplexity", wrong_caches.Window, "builtin:sink_1").checks[-1]  # evicts after 16 of 96 tokens
    full, stream, own = map(float, re.findall(r"\d+\.\d+", check.evidence))
    assert stream == own > full
    check = only("perplexity", wrong_caches.NotRenumbered, "builtin:sink_1").checks[-1]
    full, stream, own = map(float, re.findall(r"\d+\.\d+", check.evidence))
    assert own > stream > full
    assert check.verdict == "fail"
    full, stream, own = re.findall(r"\d+\.\d+", only("perplexity", DynamicCache, "builtin:sink_1").checks[-1].evidence)
    assert full == stream == own


def test_a_page_needs_no_other_file_and_shows_every_check():
    result = kvbench.audit(wrong_caches.EvictsOneTooMany, model(), budget=BUDGET, skip=["padding"])
    page = result.to_html()
    assert "1 of" in page
    assert all(f">{check.name}</td>" in page for check in CHECKS if check.name != "padding")
    assert "from step 17 on it holds at most 15 tokens, budget 16. Usually" in page
    assert page.count("<svg") == 1
    assert not re.findall(r'(?:src|href)="|@import|url\((?!#)', page)
    assert result.held["llama"][64][1][0] == list(range(49, 64))


def test_sinks_are_not_demanded_of_layers_with_a_window():
    assert only("sinks", "sink_window", model("gemma3_text"), budget=BUDGET + 8, sinks=4).ok


def test_an_exception_is_a_fault_and_other_checks_do_not_apply():
    class Raises(wrong_caches.Window):
        def update(self, keys, values, *args, **kwargs):
            if self.read > 20:
                raise IndexError("twenty")
            return super().update(keys, values)

    (check,) = kvbench.audit(Raises, model(), budget=BUDGET).failed
    assert (check.name, check.evidence[:30]) == ("reads", "it raises IndexError: twenty (")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command reads with one model instead of three."""
    monkeypatch.setattr(audit, "_TINY", {"gqa": "llama"})
    monkeypatch.setattr(audit, "_BUILTIN", {})


@pytest.mark.slow("about 20 runs of a model")
def test_the_command_exits_with_1_if_a_check_fails(tiny, capsys):
    file = wrong_caches.__file__
    code, out, err = bench(capsys, "audit", f"{file}:EvictsOneTooMany", "--budget", BUDGET)
    assert code == 1
    assert "budget\tfail\tfrom step 17 on it holds at most 15 tokens, budget 16. Usually: " in out
    assert err.startswith(f"bench: 1 of {len(CHECKS)} checks failed, on 1 of 1 models, in ")
    code, out, _ = bench(capsys, "audit", f"{file}:Window", "--budget", BUDGET, "--json")
    result = json.loads(out)
    assert (code, result["ok"], result["target"]) == (0, True, f"{file}:Window")
    assert {check["name"] for check in result["checks"]} == {check.name for check in CHECKS}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["h3o"], "unknown policy 'h3o', did you mean"),
        (["DynamicCache", "--skip", "mask_"], "--skip mask_: no such check, did you mean 'mask'?"),
        (["DynamicCache", "--set", "size=3"], "size"),
        (["h2o", "--capacity", "4000"], "budget 4000: the audit reads 8033 distinct tokens, and the model has 4096"),
        (["dense", "--budget", "16"], "dense never evicts: leave out --budget"),
        (["recompute_window", "--budget", "16"], "recompute_window keeps no cache"),
        (["DynamicCache", "--like", "h3o"], "unknown policy 'h3o'"),
        (["kvpress:SnapKVPress"], "kvpress is not installed here: `make peers`"),
        (["DynamicCache", "--model", "nowhere/at-all.gguf"], "nowhere/at-all.gguf"),
    ],
)
def test_a_mistake_is_one_line(command, message, tiny, capsys):
    code, _, err = bench(capsys, "audit", *command)
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err


OWN = """
from transformers.cache_utils import DynamicCache, DynamicLayer

class Sized(DynamicLayer):
    def __init__(self, capacity=1000, seed=0):
        super().__init__()
        self.capacity = capacity

    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values)
        self.keys, self.values = keys[:, :, -self.capacity:], values[:, :, -self.capacity:]
        return keys, values

class Fails(DynamicCache):
    def __init__(self, config):
        raise KeyError("size")

class NoCache:
    pass
"""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["Sized", "--set", "size=3"], ":Sized has no such parameter"),
        (["Fails"], "Fails: the cache can't be created: KeyError: 'size' (own.py:16, in __init__)"),
        (["NoCache"], "is not a kvbench.Policy"),
        (["Missing"], "has no 'Missing'"),
    ],
)
def test_a_mistake_in_a_users_file_is_one_line(command, message, tiny, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    code, _, err = bench(capsys, "audit", f"{tmp_path / 'own.py'}:{command[0]}", *command[1:])
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err


def test_a_parameter_of_the_budget_gets_it_and_may_have_any_name(tiny, tmp_path, capsys):
    """`capacity` and `seed` mean something else in a suite."""
    (tmp_path / "own.py").write_text(OWN)
    skip = [part for check in CHECKS if check.name not in ("reads", "budget") for part in ("--skip", check.name)]
    for settings, code in (([], 0), (["--set", "capacity=20", "--set", "seed=1"], 1)):
        assert bench(capsys, "audit", f"{tmp_path / 'own.py'}:Sized", "--budget", 16, *settings, *skip)[0] == code


def test_a_function_that_returns_no_cache_is_a_mistake():
    with pytest.raises(UserError, match="expected a function that returns a transformers Cache, not a dict"):
        kvbench.audit(lambda: {}, model())


def test_a_model_whose_attention_is_not_shown_is_refused():
    with pytest.raises(UserError, match="falcon: its attention does not go through transformers' AttentionInterface"):
        kvbench.audit(DynamicCache, model("falcon"))


@pytest.mark.slow("about 20 runs of a model")
@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "gpt2"])
def test_other_families(family):
    """RoPE of some dims, attention that only `eager` computes, and learned positions."""
    result = kvbench.audit(wrong_caches.Window, model(family), budget=BUDGET)
    assert result.ok, f"{result}"
    assert {check.verdict for check in result.checks if check.name in ("rows", "mask", "positions")} == {"pass"}
