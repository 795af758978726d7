"""`bench policy check` finds the faults of a policy, and none in ours."""

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from factories import default_policies
from helpers import bench

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.rules import rules
from kvbench.harness.rules.rules import broken_rules, refuse_if_broken
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


@pytest.mark.slow("takes seconds")
def test_a_policy_from_a_file_needs_no_change_of_ours(tmp_path: Path):
    file = tmp_path / "norm.py"
    file.write_text(
        "from kvbench import CacheView, Policy\n\n\nclass SmallKeys(Policy):\n"
        "    def importance(self, view: CacheView):\n        return -view.keys.float().norm(dim=-1)\n"
    )
    assert policy_check.check(f"{file}:SmallKeys", capacities=[17]).ok


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


def test_a_crash_says_where(monkeypatch):
    (check,) = checked(monkeypatch, CrashesWhenBound, capacities=[16]).failed
    assert check.evidence.startswith("bind(16) raises ZeroDivisionError: division by zero (test_policy_check.py:")
    assert check.evidence.endswith(", in bind)")
    (check,) = checked(monkeypatch, BreaksLater, capacities=[16]).failed
    assert check.evidence.startswith("it raises OverflowError: thirty (test_policy_check.py:")
    assert "in importance)" in check.evidence
    assert any("not in the policy's" in check.evidence for check in checked(monkeypatch, Undeclared, capacities=[16]).failed)


@pytest.mark.parametrize("name", default_policies())
def test_our_policies_break_no_rule_at_any_capacity(name, monkeypatch):
    """For the largest stands one of half as many slots as elsewhere, still more than 16 bits can count."""
    monkeypatch.setattr(rules, "LARGEST", 2**16 + 1)
    kind = plugins.policy_class(name)
    capacity = 500 if name == "rkv" else 10**9  # it compares all pairs of keys
    assert broken_rules(kind(), capacity if kind.evicts else None) == []


class Late(Policy):
    """A window until token 100, then `late`."""

    def importance(self, view):
        return torch.where(view.step >= 100, self.late(view), -view.age.float())


class LateNan(Late):
    def late(self, view):
        return torch.full_like(view.age, torch.nan, dtype=torch.float32)


class LateInf(Late):
    def late(self, view):
        return torch.full_like(view.age, inf, dtype=torch.float32)


class LateDice(Late):
    def late(self, view):
        return torch.rand_like(view.age, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "word"), [(LateNan, "is NaN at token"), (LateInf, "+inf at token"), (LateDice, "two calls differ")]
)
def test_a_policy_that_breaks_a_rule_only_later_is_refused(kind, word):
    """They once ran without an error and were in effect a window."""
    (check,) = broken_rules(kind(), 8)
    assert word in check.evidence


@pytest.mark.parametrize(
    ("kind", "capacity", "word"),
    [
        (Dice, 32, "uniform"),
        (Near, 8, "+inf as soon as the cache is full"),
        (Nan, 32, "NaN"),
        (Half, 32, "expected"),
        (Everything, 16, "+inf"),
        (Vandal, 32, "changed in place"),
        (Careless, 32, "changed in place"),
        (SecretlyHead, 32, "declare scope 'head'"),
        (SecretlyLayer, 16, "declare scope 'layer'"),
        (Saturating, 6, "+inf 42 tokens after the cache is full"),
        (BySlot, 32, "order of slots"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_refused_and_the_check_says_why(kind, capacity, word, monkeypatch):
    with pytest.raises(UserError) as refused:
        refuse_if_broken("my.py:Mine", kind(), capacity, torch.device("cpu"))
    text = str(refused.value)
    assert text.startswith(f"my.py:Mine at capacity {capacity} breaks a rule (")
    assert text.endswith(f"'bench policy check my.py:Mine --capacity {capacity}'")
    assert word in text
    assert any(word in check.evidence for check in checked(monkeypatch, kind, capacities=[capacity]).checks)


NEAR = """
from math import inf
from kvbench.policies import Policy

class Near(Policy):
    def importance(self, view):
        return view.position.float().masked_fill(view.age < 16, inf)
"""


@pytest.mark.slow("measures suites")
def test_a_run_refuses_it_before_anything_is_measured(tmp_path, model_dir, text_dir, capsys):
    """The refusal is one line. A policy that keeps the rules runs."""
    file = tmp_path / "near.py"
    file.write_text(NEAR)
    args = ["run", "smoke", "--model", model_dir, "--data", text_dir, "--results", tmp_path / "results", "--set", "tokens=60"]
    args += ["--policy", "window", "--policy", f"{file}:Near"]
    code, _, err = bench(capsys, *args, "--set", "capacity=8")
    assert code == 2
    assert "Near at capacity 8 breaks a rule (importance is never NaN, nor +inf for all of a full cache)" in err
    assert not list(tmp_path.rglob("*.json"))
    code, out, _ = bench(capsys, *args, "--set", "capacity=16", "--json")
    assert code == 0
    assert len(json.loads(out)) == 2


def test_the_command_shows_a_verdict_per_capacity_and_exits_with_1(tmp_path, capsys):
    (tmp_path / "near.py").write_text(NEAR)
    code, out, _ = bench(capsys, "policy", "check", f"{tmp_path / 'near.py'}:Near", "--capacity", 8, "--capacity", 32)
    assert code == 1
    assert "for all of a full cache\tfail\tpass\t8: every slot is +inf as soon as the cache is full" in out


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("name", default_policies())
def test_our_policies_pass(name, monkeypatch):
    """At an odd capacity, or where their defaults don't fit in, at a large one. How fast they are read is not asked here."""
    monkeypatch.setattr(policy_check, "_reading", lambda on: "")
    result = policy_check.check(name, capacities=[17])
    if [check.name for check in result.checks] == ["it can serve a capacity"]:
        result = policy_check.check(name, capacities=[256])
    assert result.failed == []


class Greedy(Policy):
    """Claims to keep the first token, too, but does not."""

    def band(self, capacity):
        return 1, capacity - 1

    def importance(self, view):
        return view.position.float()


def test_a_band_that_is_not_kept_is_found(monkeypatch):
    (check,) = checked(monkeypatch, Greedy, capacities=[16]).failed
    assert check.evidence == "after 17 tokens it keeps [1] where its band says [0]"


def test_every_step_of_a_check_is_reported_as_it_begins(monkeypatch):
    monkeypatch.setattr(policy_check, "_reading", lambda on: "")
    steps = []
    policy_check.check("window", capacities=[16, 17], progress=lambda *step: steps.append(step))
    assert steps == [("rules at capacity 16", 1, 3), ("rules at capacity 17", 2, 3), ("method and speed", 3, 3)]
