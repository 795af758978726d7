"""`bench policy check` finds what is wrong with a policy, and nothing wrong with ours."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from harness import policy_check, registry
from policies import AttentionSum, Policy, Statistic


@pytest.mark.parametrize("name", registry.policy_names())
def test_our_policies_pass(name):
    assert [f for f in policy_check.run_checks(name) if not f.ok] == []


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
    @staticmethod
    def update(state, attention, view):
        return state.add_(attention.sum(2))


class Careless(Policy):
    statistics: ClassVar = (InPlace,)

    def importance(self, view):
        return view.state(InPlace)


@dataclass(frozen=True)
class Undeclared(Policy):
    def importance(self, view):
        return view.state(AttentionSum)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Half, "expected"), (Everything, "+inf"), (Dice, "uniform"), (Vandal, "changed in place"), (BySlot, "order of slots"),
        (SecretlyHead, "declare scope 'head'"), (SecretlyLayer, "declare scope 'layer'"), (Nan, "NaN"),
        (Careless, "changed in place"), (Undeclared, "not in the policy's"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(kind, word, monkeypatch):
    monkeypatch.setattr(registry, "policy_class", lambda name: kind)
    problems = [f.problem for f in policy_check.run_checks("theirs")]
    assert any(word in p for p in problems), problems


def test_a_policy_from_a_file_needs_no_change_of_ours(tmp_path: Path):
    file = tmp_path / "norm.py"
    file.write_text(
        "from policies import CacheView, Policy\n\n\nclass SmallKeys(Policy):\n"
        "    def importance(self, view: CacheView):\n        return -view.keys.float().norm(dim=-1)\n"
    )
    assert all(f.ok for f in policy_check.run_checks(f"{file}:SmallKeys"))
