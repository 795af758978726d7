"""Rules of the policy interface that can be checked without a model, in milliseconds.

A policy that breaks a rule would run and give wrong figures. Every user's policy is therefore checked before a run;
`bench policy check` checks a policy at several capacities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.harness.core import plugins
from kvbench.harness.core.checks import Check, judged, outcome_of, skipped
from kvbench.harness.core.errors import UserError
from kvbench.harness.rules.views import (
    LARGEST,
    attention,
    cache_over_steps,
    first_state,
    later,
    mapped,
    mixed,
    random_view,
    updated,
)
from kvbench.policies import CacheView, Policy

CPU = torch.device("cpu")
_CAPACITY_OF_DENSE = 16  # tokens in the caches shown to a policy that never evicts
_COMPARED = 2**12  # tokens in the caches shown to a policy that compares slots, except one view at its capacity
_MAX_STEPS = 64
_MAX_SLOTS_OF_ALL_STEPS = 2**17
_SEE_ABOVE = skipped("not tried: see above")
_LATER_TOKENS = (100, 1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class PolicyAtCapacity:
    """A policy at one capacity."""

    policy: Policy  # bound to the capacity, if it evicts
    unbound: Policy  # the policy before it was bound
    capacity: int  # capacity of the caches shown to the policy
    device: torch.device = CPU

    @property
    def label(self) -> str:
        """Name in reports: the capacity, or "any" for a policy that never evicts."""
        return str(self.capacity) if self.policy.evicts else "any"

    @property
    def steps(self) -> int:
        """Number of steps for which the policy makes its own choices."""
        return max(2, min(_MAX_STEPS, _MAX_SLOTS_OF_ALL_STEPS // (self.capacity + 1)))


Rule = tuple[str, Callable[[PolicyAtCapacity], str]]  # name; check, which returns a problem, or "" if there is none


def at_capacity(policy: Policy, capacity: int | None, device: torch.device = CPU) -> PolicyAtCapacity:
    """Bind a policy to a capacity for checking.

    Raises:
        ValueError: the policy can't work with this capacity.
    """
    if not policy.evicts or capacity is None:
        return PolicyAtCapacity(policy, policy, _CAPACITY_OF_DENSE, device)
    return PolicyAtCapacity(policy.bind(capacity), policy, capacity, device)


@torch.inference_mode()  # as in a run
def check_rules(rules: Iterable[Rule], on: PolicyAtCapacity) -> list[Check]:
    """Check rules on a policy, in order. After a broken rule of `FOUNDATIONS`, other rules are not tried.

    An error of the policy that an earlier rule reported is not reported again.
    """
    checks: list[Check] = []
    for name, test in rules:
        is_baseless = any(check.verdict == "fail" and check.name in dict(FOUNDATIONS) for check in checks)
        outcome = _SEE_ABOVE if is_baseless else outcome_of(lambda test: judged(test(on)), test)
        is_reported = outcome.error is not None and any(check.evidence == outcome.evidence for check in checks)
        checks.append(Check(on.label, name, *(_SEE_ABOVE if is_reported else outcome)))
    return checks


def broken_rules(policy: Policy, capacity: int | None, device: torch.device = CPU) -> list[Check]:
    """Return the rules of this module that an unbound policy breaks at a capacity (None: it never evicts).

    The largest capacity checked is `LARGEST`. A policy that compares slots is shown one cache at its capacity, and is checked
    against all rules at a smaller capacity, because its cost can grow faster than the number of slots.
    """
    if not policy.caches:  # its importance is never used
        return []
    try:
        on = at_capacity(policy, None if capacity is None else min(capacity, LARGEST), device)
        small = _smaller(on)
    except (Exception, SystemExit):  # the cell, which binds it again, fails with this error
        return []
    checks = check_rules(RULES, on) if small is None else check_rules(RULES, small) + check_rules([_AT_CAPACITY], on)
    return [check for check in checks if check.verdict == "fail"]


def _smaller(on: PolicyAtCapacity) -> PolicyAtCapacity | None:
    """Return the policy at a capacity where all rules are cheap to check; None if they are already, or it can't be bound."""
    if on.policy.scope == "slot" or on.capacity <= _COMPARED:
        return None
    try:
        return at_capacity(on.unbound, _COMPARED, on.device)
    except ValueError:  # e.g. its window is larger
        return None


def refuse_if_broken(name: str, policy: Policy, capacity: int | None, device: torch.device) -> None:
    """Refuse a user's unbound policy that breaks a rule.

    A policy that raises is let through: its cell fails, and the other cells still run.
    """
    broken = [] if plugins.is_ours(type(policy)) else broken_rules(policy, capacity, device)
    first = next((check for check in broken if check.error is None), None)
    if first is not None:
        label, option = (name, "") if capacity is None else (f"{name} at capacity {capacity}", f" --capacity {capacity}")
        raise UserError(f"{label} breaks a rule ({first.name}): {first.evidence}; see 'bench policy check {name}{option}'")


def _shape(on: PolicyAtCapacity) -> str:
    view = random_view(on.policy, on.capacity, on.device)
    for statistic, state in view.states.items():
        if state.shape != first_state(statistic, view).shape:
            return f"the state of {type(statistic).__name__} became {list(state.shape)}"
    return _misshapen(on.policy.importance(copy.deepcopy(view)), view)


def _misshapen(out: object, view: CacheView) -> str:
    """Describe importance that is not float32 [B, H, S]; empty if it is."""
    expected = f"{list(view.rank.shape)} torch.float32 on {view.rank.device}"
    if not isinstance(out, Tensor):
        return f"it returned {type(out).__name__}, expected a tensor {expected}"
    if out.shape != view.rank.shape or out.dtype != torch.float32 or out.device != view.rank.device:
        return f"it returned {list(out.shape)} {out.dtype} on {out.device}, expected {expected}"
    return ""


def _undecided(out: Tensor, evicts: bool, when: str = "") -> str:
    """Describe importance by which no slot of a full cache can be chosen: NaN, or +inf for all slots; empty if one can be."""
    if out.isnan().any():
        return f"importance is NaN{when}"
    if evicts and (out == torch.inf).all(-1).any():
        return f"every slot is +inf{when}, so nothing may be evicted: `bind` must refuse a capacity that is too small"
    return ""


def _at_capacity(on: PolicyAtCapacity) -> str:
    """Check one random full cache."""
    view = random_view(on.policy, on.capacity, on.device)
    out = on.policy.importance(view)
    return _misshapen(out, view) or _undecided(out, on.policy.evicts)


def _pure(on: PolicyAtCapacity) -> str:
    view = random_view(on.policy, on.capacity, on.device)
    before, step = copy.deepcopy(view), attention(view, torch.Generator().manual_seed(0))
    step_before = copy.deepcopy(step)
    on.policy.importance(view)
    updated(view, step)
    for name in ("rank", "position", "step", "keys", "values", "layer"):
        if not torch.equal(getattr(view, name), getattr(before, name)):
            return f"view.{name} was changed in place: return a new tensor"
    if any(not torch.equal(x, before.states[s]) for s, x in view.states.items()):
        return "a state was changed in place: return a new tensor"
    same = all(torch.equal(x, vars(step_before)[name]) for name, x in vars(step).items())
    return "" if same else "attention was changed in place: return a new tensor"


def _deterministic(on: PolicyAtCapacity) -> str:
    view = random_view(on.policy, on.capacity, on.device)
    first, second = on.policy.importance(view), on.policy.importance(view)
    return "" if _equal(first, second, 0) else "two calls differ; use view.uniform() for randomness"


def _finite(on: PolicyAtCapacity) -> str:
    """Check random caches, and caches that result from the policy's own choices."""
    for seed in range(2):
        if problem := _undecided(on.policy.importance(random_view(on.policy, on.capacity, on.device, seed)), evicts=False):
            return problem
    views = cache_over_steps(on.policy, on.capacity, on.steps, on.device) if on.policy.evicts else ()
    for step, view in enumerate(views):
        when = f" {step} tokens after the cache is full" if step else " as soon as the cache is full"
        if problem := _undecided(on.policy.importance(view), on.policy.evicts, when):
            return problem
    return ""


def _later(on: PolicyAtCapacity) -> str:
    """Check the first caches that result from the policy's own choices, shifted far into a stream."""
    if _finite(on):
        return ""  # already reported
    views = list(cache_over_steps(on.policy, on.capacity, min(2, on.steps), on.device)) if on.policy.evicts else []
    for view in views or [random_view(on.policy, on.capacity, on.device)]:
        for moved in (later(view, tokens) for tokens in _LATER_TOKENS):
            out, when = on.policy.importance(moved), f" at token {int(moved.step.max()):,}"
            if problem := _undecided(out, on.policy.evicts, when):
                return problem
            if not _equal(out, on.policy.importance(moved), 0):
                return f"two calls differ{when}; use view.uniform() for randomness"
    return ""


def _scope(on: PolicyAtCapacity) -> str:
    """Check that the importance does not change if slots are permuted or if values outside the scope change."""
    policy, scope = on.policy, on.policy.scope
    view, other = (random_view(policy, on.capacity, on.device, seed) for seed in (0, 1))
    plain = policy.importance(view)
    order = torch.randperm(on.capacity + 1, generator=torch.Generator().manual_seed(1)).to(on.device)
    if not _equal(policy.importance(mapped(view, lambda x: x[:, :, order])), plain[:, :, order]):
        return "it depends on the order of slots, which means nothing"
    if not _equal(policy.importance(mixed(view, other, (slice(0, 1),)))[0], plain[0]):
        return "one stream's importance depends on another stream"
    if scope != "layer":
        one_head = mixed(view, other, (slice(None), slice(0, 1)))
        if not _equal(policy.importance(one_head)[:, 0], plain[:, 0]):
            return f"scope is '{scope}', but a head's importance depends on other heads; declare scope 'layer'"
    if scope == "slot":
        one_slot = mixed(view, other, (slice(None), slice(None), slice(0, 1)))
        if not _equal(policy.importance(one_slot)[:, :, 0], plain[:, :, 0]):
            return "scope is 'slot', but a slot's importance depends on other slots; declare scope 'head'"
    return ""


def _equal(a: Tensor, b: Tensor, rounding: float = 1e-5) -> bool:
    """Whether two tensors are equal up to the rounding of sums in another order."""
    return torch.allclose(a, b, rtol=rounding, atol=rounding, equal_nan=True)


FOUNDATIONS: tuple[Rule, ...] = (
    ("importance is float32 [B, H, S], one number per slot", _shape),
    ("importance changes no view, state or attention", _pure),
    ("equal views give equal importance", _deterministic),
)
_AT_CAPACITY: Rule = ("importance can be computed at the given capacity", _at_capacity)
RULES: tuple[Rule, ...] = (
    *FOUNDATIONS,
    ("importance is never NaN, nor +inf for all of a full cache", _finite),
    ("importance is valid and repeatable far into a stream", _later),
    ("importance keeps to the declared scope", _scope),
)
