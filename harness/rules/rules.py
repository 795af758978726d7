"""The rules of the policy interface that can be checked without a model, in milliseconds.

A policy that breaks a rule would run and give wrong figures. So every user's policy is checked before a run;
`bench policy check` checks it at several capacities.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.rules.views import Case, attention, combined, first_state, updated
from kvbench.policies import CacheView, Policy

_LARGEST = 2**12  # tokens in the caches shown to a policy before a run
_LATER_TOKENS = (100, 1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class RuleResult:
    """The result of checking one rule."""

    rule: str  # what the interface demands
    problem: str = ""  # what is wrong with the policy; empty if nothing
    note: str = ""  # why the rule was not checked; empty if it was
    error: Exception | SystemExit | None = None  # what the policy raised, if anything

    @property
    def ok(self) -> bool:
        """Whether the policy passed, or the rule was not checked."""
        return not self.problem


Rule = tuple[str, Callable[[Case], str]]


def checked(rules: Iterable[Rule], on: Case) -> list[RuleResult]:
    """Check rules on a policy, in order. After a broken rule, the others are not tried."""
    results: list[RuleResult] = []
    for name, test in rules:
        if not all(result.ok for result in results):
            results.append(RuleResult(name, note="not tried: see above"))
            continue
        try:
            with torch.inference_mode():  # like in a run
                results.append(RuleResult(name, test(on)))
        except (Exception, SystemExit) as error:  # a user's policy may raise anything
            results.append(RuleResult(name, f"it raised {described(error)}", error=error))
    return results


def broken_rule(policy: Policy, capacity: int | None, device: torch.device) -> RuleResult | None:
    """Return the first rule that an unbound policy breaks at a capacity, or at `_LARGEST`. None as capacity: it never evicts."""
    if not policy.caches:  # its importance is never used
        return None
    try:
        on = Case(policy, None if capacity is None else min(capacity, _LARGEST), device)
    except (Exception, SystemExit):  # its cell fails, and says why; or its window is larger than `_LARGEST`
        return None
    return next((result for result in checked(RULES, on) if not result.ok), None)


def refuse_if_broken(name: str, policy: Policy, capacity: int | None, device: torch.device) -> None:
    """Refuse a user's unbound policy that breaks a rule.

    A policy that raises is let through: its cell fails, and the other cells still run.

    Raises:
        UserError: the policy breaks a rule.
    """
    broken = None if plugins.is_ours(type(policy)) else broken_rule(policy, capacity, device)
    if broken is not None and broken.error is None:
        label, option = (name, "") if capacity is None else (f"{name} at capacity {capacity}", f" --capacity {capacity}")
        raise UserError(f"{label} breaks a rule ({broken.rule}): {broken.problem}; see 'bench policy check {name}{option}'")


def _shape(on: Case) -> str:
    view = on.random_view()
    for statistic, state in view.states.items():
        if state.shape != first_state(statistic, view).shape:
            return f"the state of {type(statistic).__name__} became {list(state.shape)}"
    out, expected = on.policy.importance(copy.deepcopy(view)), f"{list(view.rank.shape)} torch.float32 on {on.device}"
    if not isinstance(out, Tensor):
        return f"it returned {type(out).__name__}, expected a tensor {expected}"
    if out.shape != view.rank.shape or out.dtype != torch.float32 or out.device != view.rank.device:
        return f"it returned {list(out.shape)} {out.dtype} on {out.device}, expected {expected}"
    return ""


def _pure(on: Case) -> str:
    view = on.random_view()
    step = attention(view, torch.Generator().manual_seed(0))
    view_before, step_before = copy.deepcopy((view, step))
    on.policy.importance(view)
    updated(view, step)
    for name in ("rank", "position", "step", "keys", "values", "layer"):
        if not torch.equal(getattr(view, name), getattr(view_before, name)):
            return f"view.{name} was changed in place"
    if any(not torch.equal(x, view_before.states[s]) for s, x in view.states.items()):
        return "a state was changed in place"
    return "" if all(torch.equal(x, vars(step_before)[k]) for k, x in vars(step).items()) else "attention was changed in place"


def _deterministic(on: Case, view: CacheView | None = None, when: str = "") -> str:
    view = view or on.random_view()
    same = _equal(on.policy.importance(view), on.policy.importance(view), 0)
    return "" if same else f"two calls differ{when}; use view.uniform() for randomness"


def _finite(on: Case) -> str:
    """Check random caches, and those that result from the policy's own choices."""
    if any(on.policy.importance(on.random_view(seed)).isnan().any() for seed in range(2)):
        return "there is a NaN"
    for step, view in enumerate(on.views_over_steps()):
        if problem := _invalid(on, view, f"{step} tokens after the cache is full" if step else "as soon as the cache is full"):
            return problem
    return ""


def _invalid(on: Case, view: CacheView, when: str) -> str:
    """Describe what is wrong with the importance of a view; empty if nothing is."""
    out = on.policy.importance(view)
    if out.isnan().any():
        return f"importance is NaN {when}"
    if on.policy.evicts and (out == torch.inf).all(-1).any():
        return f"every slot is +inf {when}, so nothing may be evicted; protect at most {on.capacity} tokens"
    return ""


def _later(on: Case) -> str:
    """Check the first caches that result from the policy's own choices, moved far into a stream."""
    for view in [*itertools.islice(on.views_over_steps(), 2)] or [on.random_view()]:
        for tokens in _LATER_TOKENS:
            moved = copy.copy(view)
            moved.position, moved.step = view.position + tokens, view.step + tokens
            when = f"at token {int(moved.step.max()):,}"
            if problem := _invalid(on, moved, when) or _deterministic(on, moved, f" {when}"):
                return problem
    return ""


def _scope(on: Case) -> str:
    """Permute the slots, and change what is outside the scope. Neither may change the importance."""
    policy, scope = on.policy, on.policy.scope
    view, other = on.random_view(0), on.random_view(1)
    plain = policy.importance(view)
    order = torch.randperm(on.capacity + 1, generator=torch.Generator().manual_seed(1)).to(on.device)
    if not _equal(policy.importance(combined(view, view, lambda x, _: x[:, :, order])), plain[:, :, order]):
        return "it depends on the order of slots, which means nothing"

    def alone(*part: slice) -> bool:
        """Return whether a part of the view has the same importance if everything else is another view's."""

        def kept(mine: Tensor, theirs: Tensor) -> Tensor:
            out = theirs.clone()
            out[part] = mine[part]
            return out

        mixed = combined(view, other, kept, of_heads=len(part) < 3)
        return _equal(policy.importance(mixed)[part], plain[part])

    first, every = slice(0, 1), slice(None)
    if not alone(first):
        return "one stream's importance depends on another stream"
    if scope != "layer" and not alone(every, first):
        return f"scope is '{scope}', but a head's importance depends on other heads; declare scope 'layer'"
    if scope == "slot" and not alone(every, every, first):
        return "scope is 'slot', but a slot's importance depends on other slots; declare scope 'head'"
    return ""


def _equal(a: Tensor, b: Tensor, rounding: float = 1e-5) -> bool:
    """Return whether two tensors are equal up to the rounding of sums in another order."""
    return torch.allclose(a, b, rtol=rounding, atol=rounding, equal_nan=True)


RULES: tuple[Rule, ...] = (
    ("importance is float32 [B, H, S], one number per slot", _shape),
    ("importance changes no view, state or attention", _pure),
    ("equal views give equal importance", _deterministic),
    ("importance is never NaN, nor +inf for all of a full cache", _finite),
    ("importance is valid and repeatable far into a stream", _later),
    ("importance keeps to the declared scope", _scope),
)
