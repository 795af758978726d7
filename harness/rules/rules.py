"""The interface's rules that need no model: each tried on a policy in milliseconds, with what is wrong in words.

A policy that breaks one would be measured as if nothing were wrong, so each that is not ours is held to them before a run;
`bench policy check` tries them at several capacities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.rules.views import LARGEST, attention, cache_over_steps, later, mapped, mixed, random_view, updated
from kvbench.policies import Policy

CPU = torch.device("cpu")
_UNLIMITED = 16  # tokens of the caches that are shown to a policy that never evicts
_STEPS = 64  # of the policy's own choices
_ELEMENTS = 2**17  # slots of all steps together, for large caches
_LATER = (100, 1_000, 10_000, 100_000, 1_000_000)  # tokens further into a stream


@dataclass(frozen=True)
class Finding:
    """One rule tried on a policy.

    Attributes:
        rule: what the interface asks for.
        problem: what is wrong with the policy; empty if nothing.
        note: why the rule was not tried; empty if it was.
        error: what the policy raised, if it did.
    """

    rule: str
    problem: str = ""
    note: str = ""
    error: Exception | SystemExit | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.problem


@dataclass(frozen=True)
class Case:
    """A policy at one capacity.

    Attributes:
        policy: bound, if it evicts.
        unbound: as it was given.
        capacity: of the caches that it is shown.
        device: of their tensors.
    """

    policy: Policy
    unbound: Policy
    capacity: int
    device: torch.device = CPU

    @property
    def steps(self) -> int:
        """How long the policy is followed."""
        return max(2, min(_STEPS, _ELEMENTS // (self.capacity + 1)))


Rule = tuple[str, Callable[[Case], str]]


def case(policy: Policy, capacity: int | None, device: torch.device = CPU) -> Case:
    """A policy as it is shown caches.

    Raises:
        ValueError: the capacity can't serve it.
    """
    if not policy.evicts or capacity is None:
        return Case(policy, policy, _UNLIMITED, device)
    return Case(policy.bind(capacity), policy, capacity, device)


def tried(rules: Iterable[Rule], on: Case, before: Sequence[Finding] = ()) -> list[Finding]:
    """Rules tried on a policy. What it raises again is told once.

    Args:
        rules: to try.
        on: the policy.
        before: what was found of it before.
    """
    findings: list[Finding] = []
    raised = {f.problem for f in before if f.error is not None}
    for name, test in rules:
        try:
            with torch.inference_mode():  # as it is asked in a run
                findings.append(Finding(name, test(on)))
        except (Exception, SystemExit) as error:  # a policy of the user's may do anything
            problem = f"it raised {described(error)}"
            again = problem in raised
            findings.append(Finding(name, note="not tried: see above") if again else Finding(name, problem, error=error))
            raised.add(problem)
    return findings


def cheap_findings(on: Case) -> list[Finding]:
    """All rules of this module. Where one of the first three is broken the others would only say so again."""
    findings: list[Finding] = []
    for number, (name, test) in enumerate((*FOUNDATIONS, *OTHERS)):
        broken = number >= 1 and not all(f.ok for f in findings[: len(FOUNDATIONS)])
        findings += [Finding(name, note="not tried: see above")] if broken else tried([(name, test)], on, findings)
    return findings


def broken_rules(policy: Policy, capacity: int | None, device: torch.device = CPU) -> list[Finding]:
    """The rules that a policy breaks at a capacity, of those that need no model.

    Args:
        policy: unbound.
        capacity: of the cell; None for a policy that never evicts. What is larger than `LARGEST` is tried at that.
        device: where the policy is to run.
    """
    if not policy.caches:  # its importance is never asked for
        return []
    try:
        on = case(policy, None if capacity is None else min(capacity, LARGEST), device)
    except ValueError as error:
        return [] if (capacity or 0) > LARGEST else [Finding("it can be bound to the capacity", str(error), error=error)]
    except (Exception, SystemExit) as error:
        return [Finding("it can be bound to the capacity", f"it raised {described(error)}", error=error)]
    return [f for f in cheap_findings(on) if not f.ok]


def refuse_if_broken(name: str, policy: Policy, capacity: int | None, device: torch.device) -> None:
    """Refuse a policy that is not ours and breaks a rule. One that raises is let through: its cell fails, and others go on.

    Args:
        name: as it was asked for.
        policy: unbound.
        capacity: of the cell.
        device: where it is to run.

    Raises:
        UserError: it does.
    """
    findings = [] if plugins.is_ours(type(policy)) else broken_rules(policy, capacity, device)
    first = next((f for f in findings if f.error is None), None)
    if first is not None:
        where, option = (name, "") if capacity is None else (f"{name} at capacity {capacity}", f" --capacity {capacity}")
        raise UserError(f"{where} breaks a rule ({first.rule}): {first.problem}; 'bench policy check {name}{option}' tells more")


def _shape(on: Case) -> str:
    view = random_view(on.policy, on.capacity, on.device)
    for statistic, state in view.states.items():
        if state.shape[:3] != view.rank.shape or state.shape[3:] != statistic.shape:
            return f"the state of {statistic.__name__} became {list(state.shape)}"
    out, expected = on.policy.importance(copy.deepcopy(view)), f"{list(view.rank.shape)} torch.float32 on {on.device}"
    if not isinstance(out, Tensor):
        return f"it returned {type(out).__name__}, expected a tensor {expected}"
    if out.shape != view.rank.shape or out.dtype != torch.float32 or out.device != view.rank.device:
        return f"it returned {list(out.shape)} {out.dtype} on {out.device}, expected {expected}"
    return ""


def _pure(on: Case) -> str:
    view = random_view(on.policy, on.capacity, on.device)
    before, mass = copy.deepcopy(view), attention(view, torch.Generator().manual_seed(0))
    mass_before = mass.clone()
    on.policy.importance(view)
    updated(view, mass)
    for name in ("rank", "position", "step", "keys", "values", "layer"):
        if not torch.equal(getattr(view, name), getattr(before, name)):
            return f"view.{name} was changed in place"
    if any(not torch.equal(x, before.states[s]) for s, x in view.states.items()):
        return "a state was changed in place"
    return "" if torch.equal(mass, mass_before) else "attention was changed in place"


def _deterministic(on: Case) -> str:
    view = random_view(on.policy, on.capacity, on.device)
    first, second = on.policy.importance(view), on.policy.importance(view)
    return "" if _equal(first, second, 0) else "two calls differ; use view.uniform() for randomness"


def _finite(on: Case) -> str:
    """On random caches, and on those that the policy itself makes."""
    views = [random_view(on.policy, on.capacity, on.device, seed) for seed in range(2)]
    if any(on.policy.importance(view).isnan().any() for view in views):
        return "there is a NaN"
    if not on.policy.evicts:
        return ""
    for step, view in enumerate(cache_over_steps(on.policy, on.capacity, on.steps, on.device)):
        out = on.policy.importance(view)
        if out.isnan().any():
            return f"there is a NaN {step} tokens after the cache is full"
        if (out == torch.inf).all(-1).any():
            when = f"{step} tokens after the cache is full" if step else "as soon as the cache is full"
            return f"every slot is +inf {when}, so nothing may be evicted; protect at most {on.capacity} tokens"
    return ""


def _later(on: Case) -> str:
    """The first caches that the policy makes itself, with their positions moved far into a stream."""
    if _finite(on):
        return ""  # told already
    views = list(cache_over_steps(on.policy, on.capacity, min(2, on.steps), on.device)) if on.policy.evicts else []
    for view in views or [random_view(on.policy, on.capacity, on.device)]:
        for moved in (later(view, tokens) for tokens in _LATER):
            out, when = on.policy.importance(moved), f"at token {int(moved.step.max()):,}"
            if out.isnan().any():
                return f"there is a NaN {when}"
            if on.policy.evicts and (out == torch.inf).all(-1).any():
                return f"every slot is +inf {when}, so nothing may be evicted"
            if not _equal(out, on.policy.importance(moved), 0):
                return f"two calls differ {when}; use view.uniform() for randomness"
    return ""


def _scope(on: Case) -> str:
    """Slots permuted, and what lies outside the scope changed."""
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
    """Equal but for the rounding of sums in another order."""
    return torch.allclose(a, b, rtol=rounding, atol=rounding, equal_nan=True)


FOUNDATIONS: tuple[Rule, ...] = (
    ("importance is [B, H, S] float32, one number a slot", _shape),
    ("views, states and attention are not changed", _pure),
    ("the same view gives the same importance", _deterministic),
)
OTHERS: tuple[Rule, ...] = (
    ("importance is never NaN, nor +inf for all of a full cache", _finite),
    ("far into a stream the same holds", _later),
    ("the declared scope holds", _scope),
)
