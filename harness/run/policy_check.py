"""`bench policy check`: checks every rule of the interface on a policy, and shows how fast blocks are read under it and why."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, described, did_you_mean
from kvbench.harness.core.parameters import policy_fields
from kvbench.harness.engine.budgets import static_table
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import PLAIN_WALK, Method
from kvbench.harness.engine.model import Model, adopt
from kvbench.harness.engine.recompute import RecomputeDecoder
from kvbench.harness.models.families import tiny_model
from kvbench.harness.rules.rules import FOUNDATIONS, OTHERS, Case, Finding, Rule, case, cheap_findings, tried
from kvbench.harness.suite import Settings, parameter_schema, policies_from
from kvbench.policies import Policy
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O

DEFAULT_CAPACITIES = (16, 17, 64, 256)
_TOKENS_PAST_FULL = 40
_VOCABULARY = 64
_TIMED_TOKENS = 512
_BINDS = "a capacity can serve it"


class Checked(NamedTuple):
    """The result of checking a policy."""

    findings: list[Finding]
    reading: str  # how blocks of tokens are read under it, and how fast; empty if a rule is broken


def check(name: str, settings: Sequence[str] = (), capacities: Sequence[int] = ()) -> Checked:
    """Check every rule on a policy.

    Args:
        name: as on the command line.
        settings: its parameters, "key=value".
        capacities: to check; `DEFAULT_CAPACITIES` if empty.

    Raises:
        UserError: the policy is unknown, or has no such parameter.
    """
    policy = _instance(name, plugins.policy_class(name), settings)
    bound, refusals = _cases(policy, capacities or DEFAULT_CAPACITIES)
    by_case = [(on, _findings(on)) for on in bound]
    findings = [_merged(rule, by_case, policy.evicts) for rule, _ in (*FOUNDATIONS, *OTHERS, *_IN_THE_LOOP) if by_case]
    ok = bool(by_case) and all(f.ok for f in (*findings, *refusals))
    return Checked([*refusals, *findings], _reading(bound[-1]) if ok else "")


def run_checks(name: str, settings: Sequence[str] = (), capacities: Sequence[int] = ()) -> list[Finding]:
    """The findings of `check`."""
    return check(name, settings, capacities).findings


def _instance(name: str, policy: type[Policy], settings: Sequence[str]) -> Policy:
    """The policy with its parameters."""
    parameters = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        parameters[key] = yaml.safe_load(text)
    try:
        known, held = parameter_schema(name, policy).model_fields, policy_fields(policy)
    except Exception as error:  # e.g. an annotation that can't be evaluated
        raise UserError(f"{name}: its parameters can't be read: {described(error)}") from error
    unknown = set(parameters) - set(known)
    if unknown:
        key = sorted(unknown)[0]
        raise UserError(f"{name} has no parameter '{key}'{did_you_mean(key, known)}")
    missing = [key for key, field in known.items() if field.is_required() and key not in parameters]
    if missing:
        raise UserError(f"{name} needs the parameter '{missing[0]}': --set {missing[0]}=...")
    for key in held & parameters.keys():
        inside = list(policies_from(parameters[key], Settings(f"--set {key}"), ()))
        if len(inside) != 1:
            raise UserError(f"--set {key}: {len(inside)} policies; check one at a time")
        (parameters[key],) = inside
    try:
        return policy(**parameters)
    except (Exception, SystemExit) as error:
        raise UserError(f"{name}: {described(error)}") from error


def _cases(policy: Policy, capacities: Iterable[int]) -> tuple[list[Case], list[Finding]]:
    """The policy bound to each capacity that it accepts, and a finding about the others."""
    if not policy.evicts:
        return [case(policy, None)], []
    bound: list[Case] = []
    refused: dict[int, str] = {}
    for capacity in sorted(set(capacities)):
        try:
            bound.append(case(policy, capacity))
        except ValueError as error:
            refused[capacity] = str(error)
        except (Exception, SystemExit) as error:  # a user's policy may raise anything
            return [], [Finding(_BINDS, f"bind({capacity}) raised {described(error)}", error=error)]
    tried_at = ", ".join(map(str, refused))
    if refused and not bound:
        *_, last = refused.values()
        return [], [Finding(_BINDS, f"it refuses every capacity tried ({tried_at}): {last}; --capacity names another")]
    first = next(iter(refused.values()), "")
    return bound, [Finding(_BINDS, note=f"not applicable at {tried_at}: {first}")] if refused else []


def _findings(on: Case) -> list[Finding]:
    """Check every rule at one capacity."""
    cheap = cheap_findings(on)
    if all(f.ok for f in cheap[: len(FOUNDATIONS)]):
        return cheap + tried(_IN_THE_LOOP, on, cheap)
    return cheap + [Finding(name, note="not tried: see above") for name, _ in _IN_THE_LOOP]


def _merged(rule: str, by_case: Sequence[tuple[Case, list[Finding]]], evicts: bool) -> Finding:
    """Merge a rule's findings at all capacities into one."""
    of_rule = [(on.capacity, f) for on, findings in by_case for f in findings if f.rule == rule]
    wrong = [(capacity, f) for capacity, f in of_rule if not f.ok]
    if not wrong:
        return next((f for _, f in of_rule if not f.note), of_rule[0][1])
    capacity, first = wrong[0]
    also = f", and at {', '.join(str(c) for c, _ in wrong[1:])}" if wrong[1:] else ""
    where = f" (at capacity {capacity}{also})" if evicts else ""
    return Finding(rule, first.problem + where, error=first.error)


def _tiny() -> Model:
    return adopt(tiny_model("llama", vocab_size=_VOCABULARY))


def _tokens(length: int, streams: int = 2) -> Tensor:
    return torch.randint(_VOCABULARY, (streams, length), generator=torch.Generator().manual_seed(0))


def _config(on: Case) -> CacheConfig:
    return CacheConfig(on.unbound, on.capacity if on.policy.evicts else None)


def _capacity(on: Case) -> str:
    """Counts what every head holds; all heads together where they need not hold the same."""
    if not on.policy.evicts or on.policy.outcome:
        return ""
    read: Any = decoder(_tiny(), _config(on), 2)
    full = max(_budgets(on))
    alike = full == on.capacity and on.policy.pool_floor(on.capacity) is None
    for block in _tokens(full + _TOKENS_PAST_FULL).split([full, *[5] * (_TOKENS_PAST_FULL // 5)], 1):
        read(block)
        if isinstance(read, RecomputeDecoder):
            counts: list[float] = [len(text) for text in read._history]
        else:
            assert isinstance(read, CachedDecoder)
            counts = [len(p) for layer in read.kept() for stream in layer for p in stream]
            counts = counts if alike else [sum(counts) / len(counts)]
        if max(counts) > on.capacity:
            return f"{max(counts):g} tokens are held at capacity {on.capacity}"
    return "" if min(counts) == on.capacity else f"only {min(counts):g} tokens are held at capacity {on.capacity}"


def _budgets(on: Case) -> list[int]:
    """How many tokens the heads of the tiny model keep."""
    table = static_table(_tiny(), _config(on), None)
    return [on.capacity] if table is None else [budget for layer in table for budget in layer]


def _equal_to_dense(on: Case) -> str:
    if on.policy.outcome:
        return ""
    model, tokens = _tiny(), _tokens(min(_budgets(on)))
    ours = decoder(model, _config(on), 2)(tokens)
    difference = (ours - decoder(model, CacheConfig(Dense()), 2)(tokens)).abs().amax().item()
    return "" if difference <= 1e-4 else f"logits differ from dense by {difference:.1g} before anything is evicted"


def _band(on: Case) -> str:
    """Compares the policy's band with the tokens that its importance keeps."""
    band = on.policy.band(on.capacity) if on.policy.evicts and on.policy.caches else None
    if band is None:
        return ""
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
    ("no more than `capacity` tokens are kept", _capacity),
    ("nothing evicted: equal to dense", _equal_to_dense),
    ("the band it names, if any, is what it keeps", _band),
)


def _reading(on: Case) -> str:
    """How blocks of tokens are read under a policy on a CPU, and how fast."""
    if not on.policy.caches:
        return "recomputes the window of every token: without a cache there is no faster way"
    if on.policy.outcome:
        return "a prompt under full attention, and decides once, at its end, what is kept of it"
    model, config = _tiny(), _config(on)
    check = fast_method(model, config)
    speed = f"{_tokens_per_second(model, config, check.method):,.0f} tokens/s through a tiny model here"
    if check.blocks != "walk":
        return f"{check.blocks}, {speed}"
    other = CacheConfig(H2O(), on.capacity)
    compiled = _tokens_per_second(model, other, fast_method(model, other).method)
    return f"plain walk ({check.refused or check.plain_because}), {speed}; h2o's compiled walk makes {compiled:,.0f}"


def _tokens_per_second(model: Model, config: CacheConfig, method: Method) -> float:
    """Speed of reading a block with a full cache."""
    read = CachedDecoder(model, config, method=method)
    full = config.capacity or _TIMED_TOKENS
    warm_up, block = _tokens(2 * full + _TIMED_TOKENS, 1).split([2 * full, _TIMED_TOKENS], 1)
    read(warm_up)
    start = time.perf_counter()
    read(block)
    return _TIMED_TOKENS / (time.perf_counter() - start)
