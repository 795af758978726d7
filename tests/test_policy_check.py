"""`bench policy check` finds the faults of a policy, and none in ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import bench
from factories import default_policies

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.rules import rules
from kvbench.harness.rules.rules import broken_rules, refuse_if_broken
from kvbench.harness.rules.views import LARGEST, cache_over_steps
from kvbench.harness.run import policy_check
from kvbench.policies import AttentionSum, Policy, Statistic
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow

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


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Half, "expected"), (Everything, "+inf"), (Dice, "uniform"), (Vandal, "changed in place"), (BySlot, "order of slots"),
        (SecretlyHead, "declare scope 'head'"), (SecretlyLayer, "declare scope 'layer'"), (Nan, "NaN"),
        (Careless, "changed in place"), (Undeclared, "not in the policy's"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(kind, word, monkeypatch):
    monkeypatch.setattr(plugins, "policy_class", lambda name: kind)
    problems = [f.problem for f in policy_check.check("theirs", capacities=[16]).findings]
    assert any(word in p for p in problems), problems


@pytest.mark.slow("takes seconds")
def test_a_policy_from_a_file_needs_no_change_of_ours(tmp_path: Path):
    file = tmp_path / "norm.py"
    file.write_text(
        "from kvbench import CacheView, Policy\n\n\nclass SmallKeys(Policy):\n"
        "    def importance(self, view: CacheView):\n        return -view.keys.float().norm(dim=-1)\n"
    )
    assert all(f.ok for f in policy_check.check(f"{file}:SmallKeys", capacities=[17]).findings)


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


class Greedy(Policy):
    """Claims to keep the first token, too, but does not."""

    def band(self, capacity):
        return 1, capacity - 1

    def importance(self, view):
        return view.position.float()


class Tova(Policy):
    scope: ClassVar = "layer"
    statistics: ClassVar = (AttentionSum(),)

    def importance(self, view):
        return view.state(AttentionSum()).mean(1, keepdim=True).expand(view.rank.shape)


class CrashesWhenBound(Policy):
    def bind(self, capacity):
        raise ZeroDivisionError("division by zero")

    def importance(self, view):
        return view.position.float()


def checked(monkeypatch, kind, *settings, capacities=()):
    monkeypatch.setattr(plugins, "policy_class", lambda name: kind)
    return policy_check.check("theirs", settings, capacities)


def wrong(found):
    return [f for f in found.findings if not f.ok]


@pytest.mark.slow("takes seconds")
def test_the_rules_hold_at_the_capacity_that_is_asked_for(monkeypatch):
    """A window of 16 protected tokens needs a capacity of at least 16."""
    (finding,) = wrong(checked(monkeypatch, Near, capacities=[8, 16, 64]))
    assert finding.problem == (
        "every slot is +inf as soon as the cache is full, so nothing may be evicted; protect at most 8 tokens (at capacity 8)"
    )
    assert not wrong(checked(monkeypatch, Near, capacities=[16]))


def test_a_capacity_that_can_not_serve_a_policy_is_no_fault_of_it(monkeypatch):
    found = checked(monkeypatch, H2O, "window=64")
    assert not wrong(found)
    assert found.findings[0].note == "not applicable at 16, 17, 64: capacity 16 can't hold window 64 + at least 1 heavy hitter"
    assert sum(not f.note for f in found.findings) == 11


def test_a_policy_that_no_capacity_can_serve_is_wrong_once(monkeypatch):
    (finding,) = checked(monkeypatch, H2O, "window=-3").findings
    assert finding.problem.startswith("it refuses every capacity tried (16, 17, 64, 256): capacity 256 can't hold window -3")


def test_a_crash_says_where(monkeypatch):
    (finding,) = wrong(checked(monkeypatch, CrashesWhenBound, capacities=[16]))
    assert finding.problem.startswith("bind(16) raised ZeroDivisionError: division by zero (test_policy_check.py:")
    assert finding.problem.endswith(", in bind)")
    found = checked(monkeypatch, BreaksLater, capacities=[16])
    (finding,) = wrong(found)
    assert finding.problem.startswith("it raised OverflowError: thirty (test_policy_check.py:")
    assert "in importance)" in finding.problem


def test_a_band_that_is_not_kept_is_found(monkeypatch):
    (finding,) = wrong(checked(monkeypatch, Greedy, capacities=[16]))
    assert finding.problem == "after 17 tokens it keeps [1] where its band says [0] (at capacity 16)"


@pytest.mark.slow("takes seconds")
def test_it_says_how_the_policy_will_be_read_and_how_fast(monkeypatch):
    assert checked(monkeypatch, SinkWindow, capacities=[64]).reading.startswith("closed form, ")
    plain = checked(monkeypatch, Tova, capacities=[64]).reading
    assert plain.startswith("plain walk (scope 'layer' can't be compiled), ")
    assert "tokens/s through a tiny model here; h2o's compiled walk makes" in plain
    assert checked(monkeypatch, Everything, capacities=[16]).reading == ""


@pytest.mark.parametrize("capacity", [8, 10**9])  # the last passes all that 5,000 and 100,000 would
@pytest.mark.parametrize("name", default_policies())
def test_our_policies_break_no_rule_at_any_capacity(name, capacity, monkeypatch):
    """For the largest stands one of half as many slots as elsewhere, still more than 16 bits can count."""
    monkeypatch.setattr(rules, "LARGEST", 2**16 + 1)
    kind = plugins.policy_class(name)
    if name == "lambda" and capacity == 8:
        assert "sinks 10" in broken_rules(kind(), capacity)[0].problem
    elif name == "rkv" and capacity >= 5_000:
        pytest.skip("it compares all pairs of keys")
    else:
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
    ("kind", "word"), [(LateNan, "a NaN at token"), (LateInf, "+inf at token"), (LateDice, "two calls differ")]
)
def test_a_policy_that_breaks_a_rule_only_later_is_refused(kind, word):
    """They once ran without an error and were in effect a window."""
    (found,) = broken_rules(kind(), 8)
    assert word in found.problem


@pytest.mark.slow("takes seconds")
def test_a_large_cache_is_made_up_small(monkeypatch):
    """The view of a cache of 100,000 tokens takes tens of MB for every model, and larger ones are not made."""
    seen = []

    class Watching(Policy):
        def importance(self, view):
            seen.append((view.rank.shape[-1], view.keys.nbytes + view.values.nbytes + view.rank.nbytes))
            return view.position.float()

    for capacity in (100_000, 10**12):
        assert broken_rules(Watching(), capacity) == []
    assert {slots for slots, _ in seen} == {100_001, LARGEST + 1}
    assert max(size for _, size in seen) < 32 * 2**20


@pytest.mark.parametrize(
    ("kind", "capacity", "word"),
    [
        (Dice, 32, "uniform"), (Near, 8, "+inf as soon as the cache is full"), (Nan, 32, "NaN"), (Half, 32, "expected"),
        (Vandal, 32, "changed in place"), (Careless, 32, "changed in place"), (SecretlyHead, 32, "declare scope 'head'"),
        (Saturating, 6, "+inf 42 tokens after the cache is full"), (BySlot, 32, "order of slots"),
    ],
)  # fmt: skip
def test_a_policy_that_breaks_a_rule_is_refused(kind, capacity, word):
    with pytest.raises(UserError) as refused:
        refuse_if_broken("my.py:Mine", kind(), capacity, torch.device("cpu"))
    text = str(refused.value)
    assert text.startswith(f"my.py:Mine at capacity {capacity} breaks a rule (")
    assert text.endswith(f"'bench policy check my.py:Mine --capacity {capacity}'")
    assert word in text


@pytest.mark.parametrize(("kind", "capacity"), [(Near, 16), (Tova, 8), (BreaksLater, 12), (Undeclared, 8)])
def test_what_keeps_the_rules_or_raises_may_run(kind, capacity):
    """A policy that raises fails its cell, with a record that says where."""
    refuse_if_broken("my.py:Mine", kind(), capacity, torch.device("cpu"))


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


def test_bind_that_crashes_is_told_with_its_line(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from kvbench.policies.window import Window\n\nclass Mine(Window):\n    def bind(self, capacity):\n        return 1 / 0\n"
    )
    code, _, err = bench(capsys, "run", "smoke", "--policy", f"{file}:Mine")
    assert code == 2
    assert "ZeroDivisionError: division by zero (mine.py:5, in bind)" in err


@pytest.mark.slow("measures suites")
def test_policy_check_tries_the_capacities_it_is_given(tmp_path, capsys):
    file = tmp_path / "near.py"
    file.write_text(NEAR)
    code, out, _ = bench(capsys, "policy", "check", f"{file}:Near", "--capacity", 8, "--capacity", 17)
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith("WRONG")] == [
        "WRONG importance is never NaN, nor +inf for all of a full cache: every slot is +inf as soon as the cache is full, so "
        "nothing may be evicted; protect at most 8 tokens (at capacity 8)"
    ]
    assert "reads" not in out
    code, out, _ = bench(capsys, "policy", "check", f"{file}:Near")
    assert code == 0
    assert out.splitlines()[-1].startswith("reads compiled walk, ")


def test_debug_shows_the_traceback_of_a_crash(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("from kvbench import Policy\n\nclass Mine(Policy):\n    def importance(self, view):\n        return 1 / 0\n")
    for options, shown in (([], False), (["--debug"], True)):
        code, out, err = bench(capsys, *options, "policy", "check", f"{file}:Mine")
        assert code == 1
        assert out.count("WRONG") == 1
        assert "ZeroDivisionError: division by zero (mine.py:5, in importance)" in out
        assert ("Traceback" in err) == shown


@pytest.mark.parametrize("policy", [SinkWindow(2), H2O(3), Near()], ids=lambda p: type(p).__name__)
def test_the_caches_that_are_made_up_are_those_of_the_policys_own_choices(policy):
    """Ranks follow positions, a new token resets its state, and the token with the lowest importance is gone."""
    bound, before = policy.bind(20), None
    for step, view in enumerate(cache_over_steps(bound, 20, 50, torch.device("cpu")), 20):
        assert torch.equal(view.rank, view.position.argsort(-1).argsort(-1))
        assert (view.position.amax(-1) == step).all()
        if before is not None:
            newest = view.age == 0
            assert torch.equal(view.position[~newest], before.position[~newest])
            assert torch.equal(newest, before.rank == importance_order(bound, before)[..., :1])
            assert all((state[newest] < 1).all() for state in view.states.values())  # a token's mass of one step
        before = view
    if isinstance(policy, SinkWindow):
        assert view.position.sort(-1).values.unique(dim=1).flatten().unique().tolist() == [0, 1, *range(step - 18, step + 1)]


def importance_order(policy, view):
    """The ranks in order of eviction. [B, H, S]."""
    by_rank = view.rank.argsort(-1)
    return policy.importance(view).take_along_dim(by_rank, -1).argsort(dim=-1, stable=True)


@pytest.mark.slow("measures suites")
def test_a_policy_that_exits_ends_no_verb_with_success(tmp_path, model_dir, text_dir, capsys):
    (tmp_path / "exits.py").write_text(
        "from kvbench import Policy\n\n\nclass Exits(Policy):\n    def importance(self, view):\n        raise SystemExit(0)\n"
    )
    policy, options = f"{tmp_path / 'exits.py'}:Exits", ("--set", "tokens=400", "--set", "capacity=8")
    code, out, _ = bench(capsys, "policy", "check", policy)
    assert code == 1
    assert "it raised SystemExit: 0 (exits.py:6, in importance)" in out
    results = ("--results", tmp_path / "r")
    code, _, err = bench(capsys, "run", "smoke", "--model", model_dir, "--data", text_dir, "--policy", policy, *options, *results)
    assert code == 4
    assert "FAILED, SystemExit" in err
