"""`bench policy check` finds the faults of a policy, and none in ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import ClassVar

import pytest
import torch
from conftest import bench
from factories import default_policies

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.rules.rules import broken_rule, refuse_if_broken
from kvbench.harness.rules.views import CPU
from kvbench.harness.run import policy_check
from kvbench.policies import AttentionSum, Policy, Statistic


class Half(Policy):
    def importance(self, view):
        return view.position.float()[:, :1]


class Everything(Policy):
    def importance(self, view):
        return torch.full_like(view.rank, inf, dtype=torch.float32)


class Dice(Policy):
    def importance(self, view):
        return torch.rand(view.rank.shape)


class Vandal(Policy):
    def importance(self, view):
        return view.rank.sub_(1).float()


class BySlot(Policy):
    def importance(self, view):
        return torch.arange(view.rank.shape[-1]).expand(view.rank.shape).float()


class SecretlyHead(Policy):
    def importance(self, view):
        return view.keys.norm(dim=-1) - view.keys.norm(dim=-1).mean(-1, keepdim=True)


class SecretlyLayer(Policy):
    scope: ClassVar = "head"

    def importance(self, view):
        return view.keys.norm(dim=-1).mean(1, keepdim=True).expand(view.rank.shape)


class Nan(Policy):
    def importance(self, view):
        return view.position.float() / 0 * 0


class InPlace(Statistic):
    def update(self, state, attention, view):
        return state.add_(attention.weights.sum(2))


class Careless(Policy):
    statistics: ClassVar = (InPlace(),)

    def importance(self, view):
        return view.state(InPlace())


@dataclass(frozen=True)
class Undeclared(Policy):
    def importance(self, view):
        return view.state(AttentionSum())


class Near(Policy):
    def importance(self, view):
        return view.position.float().masked_fill(view.age < 16, inf)


class Saturating(Policy):
    """Keeps every eighth token for ever, so that the cache is eventually full of them."""

    def importance(self, view):
        return view.position.float().masked_fill(view.position % 8 == 0, inf)


class BreaksLater(Policy):
    def importance(self, view):
        if view.step.amax() == 30:
            raise OverflowError("thirty")
        return view.position.float()


class CrashesWhenBound(Policy):
    def bind(self, capacity):
        raise ZeroDivisionError("division by zero")

    def importance(self, view):
        return view.position.float()


def checked(monkeypatch, kind, *settings, capacities=()):
    monkeypatch.setattr(plugins, "policy_class", lambda name: kind)
    return policy_check.check("theirs", settings, capacities)


class Greedy(Policy):
    """Claims to keep the first token, too, but does not."""

    def band(self, capacity):
        return 1, capacity - 1

    def importance(self, view):
        return view.position.float()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (CrashesWhenBound, r"bind\(16\) raised ZeroDivisionError: division by zero \(test_policy_check.py:\d+, in bind\)"),
        (BreaksLater, r"it raised OverflowError: thirty \(test_policy_check.py:\d+, in importance\).*"),
        (Greedy, r"after 17 tokens it keeps \[1\] where its band says \[0\] \(at capacity 16\)"),
        (Everything, r".*\+inf.*"),
        (SecretlyLayer, ".*declare scope 'layer'.*"),
        (Undeclared, ".*not in the policy's.*"),
    ],
)
def test_what_is_wrong_is_said(kind, problem, monkeypatch):
    found = [f.problem for f in checked(monkeypatch, kind, capacities=[16]).findings if not f.ok]
    assert any(re.fullmatch(problem, one) for one in found), found


@pytest.mark.parametrize("name", default_policies())
def test_our_policies_break_no_rule_at_any_capacity(name):
    kind = plugins.policy_class(name)
    capacity = 500 if name == "rkv" else 10**9  # it compares all pairs of keys
    assert broken_rule(kind(), capacity if kind.evicts else None, CPU) is None


@pytest.mark.parametrize(
    ("late", "word"),
    [
        (lambda age: torch.full_like(age, torch.nan), "is NaN at token"),
        (lambda age: torch.full_like(age, inf), "+inf at token"),
        (torch.rand_like, "two calls differ"),
    ],
)
def test_a_policy_that_breaks_a_rule_only_later_is_refused(late, word):
    """They once ran without an error and were in effect a window."""

    class Late(Policy):
        def importance(self, view):
            return torch.where(view.step >= 100, late(view.age.float()), -view.age.float())

    assert word in broken_rule(Late(), 8, CPU).problem


@pytest.mark.parametrize(
    ("kind", "capacity", "word"),
    [
        (Dice, 32, "uniform"),
        (Near, 8, "+inf as soon as the cache is full"),
        (Nan, 32, "NaN"),
        (Half, 32, "expected"),
        (Vandal, 32, "changed in place"),
        (Careless, 32, "changed in place"),
        (SecretlyHead, 32, "declare scope 'head'"),
        (Saturating, 6, "+inf 42 tokens after the cache is full"),
        (BySlot, 32, "order of slots"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_refused(kind, capacity, word):
    with pytest.raises(UserError) as refused:
        refuse_if_broken("my.py:Mine", kind(), capacity, CPU)
    text = str(refused.value)
    assert text.startswith(f"my.py:Mine at capacity {capacity} breaks a rule (")
    assert text.endswith(f"'bench policy check my.py:Mine --capacity {capacity}'")
    assert word in text


NEAR = """
from math import inf
from kvbench.policies import Policy

class Near(Policy):
    def importance(self, view):
        return view.position.float().masked_fill(view.age < 16, inf)
"""


@pytest.mark.slow("measures suites")
def test_a_run_refuses_it_before_anything_is_measured(tmp_path, model_dir, text_dir, capsys):
    file = tmp_path / "near.py"
    file.write_text(NEAR)
    args = ["run", "smoke", "--model", model_dir, "--data", text_dir, "--results", tmp_path / "results", "--set", "tokens=60"]
    code, _, err = bench(capsys, *args, "--policy", "window", "--policy", f"{file}:Near", "--set", "capacity=8")
    assert code == 2
    assert "Near at capacity 8 breaks a rule (importance is never NaN, nor +inf for all of a full cache)" in err
    assert not list(tmp_path.rglob("*.json"))


TINY = cache(policy_check._tiny)


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("name", default_policies())
def test_our_policies_pass(name, monkeypatch):
    """At an odd capacity, or where their defaults don't fit in, at a large one. How fast they are read is not asked here."""
    monkeypatch.setattr(policy_check, "_tiny", TINY)
    monkeypatch.setattr(policy_check, "_reading", lambda on: "")
    findings = policy_check.check(name, capacities=[17]).findings
    if [f.rule for f in findings] == ["a capacity can serve it"]:
        findings = policy_check.check(name, capacities=[256]).findings
    assert [f for f in findings if not f.ok] == []
