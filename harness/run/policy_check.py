"""`bench policy check`: check every rule of the interface on a policy, and show the method and speed of reading blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.core import plugins
from kvbench.harness.core.checks import Check, NotApplicableError, Report, StepProgress, require
from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.core.evict import Evict
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.engine.budgets import static_table
from kvbench.harness.engine.comparison import logits_fault
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import PLAIN_WALK, TOKEN_BY_TOKEN
from kvbench.harness.engine.model import Model, adopt, random_tokens
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.harness.models.families import tiny_model
from kvbench.harness.rules.rules import RULES, PolicyAtCapacity, Rule, at_capacity, check_rules
from kvbench.harness.run.reading_plan import block_speed
from kvbench.harness.suite import policy_with, yaml_value
from kvbench.policies import Policy, Selecting
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.merges import positions_for

DEFAULT_CAPACITIES = (16, 17, 64, 256)
_TOKENS_PAST_FULL = 40
_SELECTED_FROM_TOKENS = 400
_VOCABULARY = 64
_TIMED_TOKENS = 512
_OF_BLOCKS, _OF_DENSE = 1e-4, 1e-5  # tolerances for logits, relative to the largest, which is about 6
_EVERY = 8  # tokens evicted at once
_PROMPT_BLOCK = 64  # tokens
_BINDS = "it can serve a capacity"


@dataclass(frozen=True)
class CheckedPolicy(Report):
    """Results of all rules at every capacity.

    Attributes:
        reading: method and speed of reading blocks; empty if a rule is broken.
    """

    reading: str = ""


def check(
    name: str,
    settings: Sequence[str] = (),
    capacities: Sequence[int] = (),
    progress: StepProgress = lambda *_: None,
) -> CheckedPolicy:
    """Check every rule on a policy.

    Args:
        settings: parameters of the policy, "key=value" each.
        capacities: capacities to check; `DEFAULT_CAPACITIES` when empty.

    Raises:
        UserError: the policy is unknown, has no such parameter, or is a third-party cache.
    """
    policy = policy_from_settings(name, settings)
    if isinstance(policy, Contestant):
        raise UserError(f"{name} is a cache, not a policy, and the rules are for policies: measure it beside dense")
    bound, checks = _cases(policy, capacities or DEFAULT_CAPACITIES)
    for number, on in enumerate(bound, 1):
        progress(f"rules at capacity {on.capacity}" if policy.evicts else "rules", number, len(bound) + 1)
        checks += _checks(on)
    if not CheckedPolicy(checks).ok:
        return CheckedPolicy(checks)
    progress("method and speed", len(bound) + 1, len(bound) + 1)
    return CheckedPolicy(checks, _reading(bound[-1]))


def policy_from_settings(name: str, settings: Sequence[str]) -> Policy:
    """Return the policy with this name and the parameters of `--set`, "key=value" each.

    Raises:
        UserError: the policy is unknown, or has no such parameter.
    """
    return policy_with(name, plugins.policy_class(name), parsed_settings(settings), "--set")


def parsed_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `--set`, "key=value" each, with values in YAML.

    Raises:
        UserError: a value is not YAML.
    """
    pairs = [setting.partition("=") for setting in settings]
    return {key: yaml_value(text, f"--set {key}={text}") for key, _, text in pairs}


def _cases(policy: Policy, capacities: Iterable[int]) -> tuple[list[PolicyAtCapacity], list[Check]]:
    """Return the policy bound to each capacity that it accepts, and a result for each capacity that it refuses."""
    if not policy.evicts:
        return [at_capacity(policy, None)], []
    bound: list[PolicyAtCapacity] = []
    refused: dict[str, str] = {}
    for capacity in sorted(set(capacities)):
        try:
            bound.append(at_capacity(policy, capacity))
        except ValueError as error:
            refused[str(capacity)] = str(error)
        except (Exception, SystemExit) as error:  # a user's policy may raise anything
            return [], [Check(str(capacity), _BINDS, "fail", f"bind({capacity}) raises {described(error)}", error)]
    places = ", ".join(refused)
    if not bound:
        *_, (largest, why) = refused.items()
        problem = f"all capacities tried ({places}) are refused: {why}; --capacity names another"
        return [], [Check(largest, _BINDS, "fail", problem)]
    return bound, [
        Check(capacity, _BINDS, "not applicable", f"refused at {places}: {reason}") for capacity, reason in refused.items()
    ]


def _checks(on: PolicyAtCapacity) -> list[Check]:
    """Check every rule at one capacity."""
    if why_not := _no_table(on):
        skipped = [Check(on.label, name, "not applicable", f"not tried: {why_not}") for name, _ in _IN_THE_LOOP]
        return check_rules(RULES, on) + skipped
    return check_rules((*RULES, *_IN_THE_LOOP), on)


def _no_table(on: PolicyAtCapacity) -> str:
    """Return the reason that the policy has no budgets for the tiny model, e.g. another model's table; otherwise empty."""
    model = _tiny()
    try:
        for prompt in (None, on.capacity + _TOKENS_PAST_FULL):
            on.policy.budgets(on.capacity, len(model.layers), model.layers[0].heads, prompt)
    except ValueError as error:
        return str(error)
    except (Exception, SystemExit):  # the rules report it
        pass
    return ""


@cache
def _tiny(vocabulary: int = _VOCABULARY) -> Model:
    return adopt(tiny_model("llama", vocab_size=vocabulary))


def _tokens(length: int, streams: int = 2) -> Tensor:
    return random_tokens(_tiny().hf, streams, length)


def _config(on: PolicyAtCapacity, evict: Evict = 1) -> CacheConfig:
    takes_capacity = on.policy.evicts and not on.policy.outcome
    capacity, evict = on.capacity if takes_capacity else None, "prompt" if on.policy.outcome else evict
    return CacheConfig(on.unbound, capacity, positions_for(on.unbound), evict=evict)


def _held(read: Any) -> list[float]:
    """Return the mean number of tokens that a KV head holds, over layers and heads, for every stream."""
    if isinstance(read, RecomputeDecoder):
        return [len(text) for text in read._history]
    return [fmean(len(head) for layer in layers for head in layer) for layers in zip(*read.kept(), strict=True)]


def _capacity(on: PolicyAtCapacity) -> str:
    require(on.policy.evicts and not on.policy.outcome)
    model = _tiny()
    read: Any = decoder(model, _config(on), 2)
    table = static_table(model, _config(on), None) if on.policy.caches else None
    full = on.capacity if table is None else max(map(max, table))
    for block in _tokens(full + _TOKENS_PAST_FULL).split([full, *[5] * (_TOKENS_PAST_FULL // 5)], 1):
        read(block)
        if max(_held(read)) > on.capacity:
            return f"{max(_held(read)):g} tokens are held at capacity {on.capacity}"
    least = min(_held(read))
    return "" if least == on.capacity else f"only {least:g} tokens are held at capacity {on.capacity}"


def _after_a_prompt(on: PolicyAtCapacity) -> str:
    """Check that a prompt is read under full attention and cut once, and that the cache grows afterwards."""
    require(on.policy.evicts and on.policy.caches)
    read = CachedDecoder(_tiny(), _config(on, "prompt"), 2)
    length = on.capacity + _TOKENS_PAST_FULL
    read.read_prompt(_tokens(length), _PROMPT_BLOCK)
    after = _held(read)
    if not on.policy.outcome and set(after) != {on.capacity}:
        wrong = next(held for held in after if held != on.capacity)
        return f"{wrong:g} tokens a head are kept of a prompt of {length}, at capacity {on.capacity}"
    if max(after) > length:
        return f"{max(after):g} tokens a head are kept of a prompt of {length}"
    logits = read(_tokens(_EVERY))
    grown = [held + _EVERY for held in after]
    if _held(read) != grown:
        return f"{_held(read)[0]:g} tokens a head are held {_EVERY} tokens after the prompt, expected {grown[0]:g}"
    return "there is a NaN in the logits after a prompt" if bool(logits.isnan().any()) else ""


def _several_at_once(on: PolicyAtCapacity) -> str:
    """Compare blocks under `{every: 8}` with the same tokens one by one. No token repeats, because equal keys would tie."""
    require(on.policy.evicts and on.policy.caches and not on.policy.outcome)
    length = on.capacity + _TOKENS_PAST_FULL
    model, config = _tiny(length), _config(on, _EVERY)
    tokens = torch.stack([torch.randperm(length, generator=torch.Generator().manual_seed(stream)) for stream in range(2)])
    blocks, one_by_one = CachedDecoder(model, config, 2), CachedDecoder(model, config, 2, TOKEN_BY_TOKEN)
    first, *rest = tokens.split([on.capacity, *[5] * (_TOKENS_PAST_FULL // 5)], 1)
    blocks(first)
    one_by_one(first)
    for block in rest:
        one_by_one_logits = torch.cat([one_by_one(token) for token in block.split(1, 1)], 1)
        if fault := logits_fault(blocks(block), one_by_one_logits, _OF_BLOCKS, "the same tokens one by one"):
            return f"in a block of 5 tokens, {fault}"
    return "" if blocks.kept() == one_by_one.kept() else "a block of 5 tokens keeps other tokens than the same tokens one by one"


def _equal_to_dense(on: PolicyAtCapacity) -> str:
    require(not on.policy.outcome and not isinstance(on.policy, Selecting))
    model = _tiny()
    table = static_table(model, _config(on), None) if on.policy.evicts and on.policy.caches else None
    tokens = _tokens(on.capacity if table is None else min(map(min, table)))
    logits, expected = (decoder(model, config, 2)(tokens) for config in (_config(on), CacheConfig(Dense())))
    return logits_fault(logits, expected, _OF_DENSE, "dense before anything is evicted")


def _selection(on: PolicyAtCapacity) -> str:
    """Compare blocks, which attend under masks, with single tokens, which gather what they read."""
    require(isinstance(on.policy, Selecting))
    tokens, methods = _tokens(_SELECTED_FROM_TOKENS), (PLAIN_WALK, TOKEN_BY_TOKEN)
    by_masks, gathered = (CachedDecoder(_tiny(), _config(on), 2, method)(tokens) for method in methods)
    fault = logits_fault(by_masks, gathered, _OF_BLOCKS, "single tokens")
    return fault and f"in blocks, {fault}: are slots distinct?"


def _band(on: PolicyAtCapacity) -> str:
    """Compare the policy's band with the tokens that its importance keeps."""
    band = on.policy.band(on.capacity) if on.policy.evicts and on.policy.caches and not on.policy.outcome else None
    if band is None:
        raise NotApplicableError("does not apply")
    sinks, window = band
    if sinks < 0 or window < 1 or sinks + window != on.capacity:
        return f"sinks {sinks} + window {window} are not the capacity {on.capacity}"
    read = CachedDecoder(_tiny(), _config(on), method=PLAIN_WALK)
    blocks = _tokens(on.capacity + _TOKENS_PAST_FULL, 1).split([on.capacity, *[1] * _TOKENS_PAST_FULL], 1)
    for tokens, block in enumerate(blocks, on.capacity):
        read(block)
        expected = [p for p in range(tokens) if p < sinks or p >= tokens - window]
        kept = read.kept()[0][0][0]
        if kept != expected:
            extra, missing = sorted(set(kept) - set(expected)), sorted(set(expected) - set(kept))
            return f"after {tokens} tokens it keeps {extra} where its band says {missing}"
    return ""


_IN_THE_LOOP: tuple[Rule, ...] = (
    ("at most `capacity` tokens are kept", _capacity),
    ("a prompt is cut to the budget; then the cache grows", _after_a_prompt),
    (f"evicting every {_EVERY} tokens: a block equals the same tokens one by one", _several_at_once),
    ("until a token is evicted, logits are those of dense", _equal_to_dense),
    ("a declared band is what the policy keeps", _band),
    ("a query selects distinct tokens, in blocks and alone", _selection),
)


def _reading(on: PolicyAtCapacity) -> str:
    """Describe the method and speed of reading blocks under a policy on a CPU."""
    if holds_kv(on.policy) and not on.policy.caches:
        return "full attention from one reset to the next"
    if not on.policy.caches:
        return "the window is recomputed for every token; there is no faster method without a cache"
    if on.policy.outcome:
        return "the prompt is cut once, at its end; then the cache grows, and blocks are read as under dense"
    if _no_table(on):
        return ""
    model, config = _tiny(), _config(on)
    check = fast_method(model, config)
    speed = f"{block_speed(model, config, check.method, 1, _TIMED_TOKENS):,.0f} tokens/s with a tiny model on this machine"
    if check.blocks not in ("walk", "compiled steps"):
        return f"{check.blocks}, {speed}"
    method = "plain walk" if check.blocks == "walk" else check.blocks
    other = CacheConfig(H2O(), on.capacity)
    compiled = block_speed(model, other, fast_method(model, other).method, 1, _TIMED_TOKENS)
    return f"{method} ({check.refused or check.plain_because}), {speed}; h2o's compiled walk reaches {compiled:,.0f}"
