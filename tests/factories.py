"""Records, policies and requirements that several test modules share."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import DEVICE
from reference import after_sinks, by_number, lightest, oldest

from kvbench.harness.records import Record, digest
from kvbench.policies import CacheView, Policy, Statistic
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

POLICIES: list[Policy] = [Window(), SinkWindow(sinks=2), H2O(), Random()]
EVIL = '<script>alert("1")</script>'  # a name that must not become markup
MODES = ["cache", "stream", "clamped"]
# The design demands 1e-5. That holds in float64, where no rounding can hide a mistake; float32 gets 1e-4, because
# two orders of the same sums already differ by 1e-5 in logits of size 6.
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-4}
BOTH = pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
needs_compiler = pytest.mark.skipif(
    DEVICE.type != "cpu" or shutil.which("cc") is None, reason="compiled walks are for CPUs and need a C compiler"
)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def record(policy: str = "h2o", capacity: int | None = 8, nll: float = 2.0, **changes) -> Record:
    """The record of a finished perplexity cell."""
    cell = {
        "suite": "s", "suite_version": 1, "model": {"id": "m", "dtype": "float32"}, "task": {"name": "perplexity", "stride": 1},
        "policy": policy, "parameters": {}, "capacity": capacity, "positions": "cache", "limit": None, "seed": 0,
    }  # fmt: skip
    noise = np.random.default_rng(capacity or 0).normal(size=1024)
    blocks = {"nll_sum": [float(32 * (nll + 0.1 * x)) for x in noise], "tokens": [32] * 1024, "size": 32}
    metrics = {
        "perplexity": float(np.exp(nll)),
        "nll": nll,
        "bits_per_byte": 1.0,
        "tokens": 32768,
        "blocks": blocks,
        "kv_bytes": 640,
        "texts": {"nll_sum": [sum(blocks["nll_sum"])], "tokens": [32768]},
    }
    made = Record(cell, digest(cell), "k" * 64, "ok", metrics=metrics, data={"ids_sha256": "x", "tokens": 32768})
    made.finished = "2026-01-01T00:00:00+00:00"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def cell_record(metrics, status="ok", **changes):
    """A record of a cell that no other record has."""
    made = record()
    names = {"suite", "model", "policy", "capacity", "seed", "positions", "parameters", "task"}
    made.cell |= {k: {"id": v, "dtype": "bfloat16"} if k == "model" else v for k, v in changes.items() if k in names}
    made.cell_id, made.metrics, made.status = digest(made.cell), metrics, status
    made.facts = {"device": "a device"}
    return made


def drawn():
    """Records for a page with charts, one with a name that must not become markup."""
    facts = {"training_length": 512}
    return [record("dense", None, 1.9, facts=facts), record("window", 8, 2.1, facts=facts), record(EVIL, 8, 2.2, facts=facts)]


def uniform_number(layer: int, head: int, position: int, seed: int) -> float:
    """`CacheView.uniform` for one token."""
    at = torch.full((1, head + 1, 1), position)
    view = CacheView(at, at, at, at, at, {}, torch.tensor([[[layer]]]), 2, seed)
    return float(view.uniform()[0, head, 0])


def chooser(policy: Policy, capacity: int, seed: int):
    """The list-based version of a policy's choice."""
    bound = policy.bind(capacity)
    if isinstance(bound, SinkWindow):
        return after_sinks(bound.sinks)
    if isinstance(bound, H2O):
        return lightest(bound.window)
    return oldest if isinstance(bound, Window) else by_number(lambda *at: uniform_number(*at, seed))


@dataclass(frozen=True)
class Odd(Policy):
    """A user's policy: elementwise, with several operations and its own statistic."""

    class Decayed(Statistic):
        initial: ClassVar[float] = 0.25

        @staticmethod
        def update(state, attention, view):
            return state * 0.9 + attention.sum(2) * 2

    statistics = (Decayed,)
    half: float = 0.5

    def importance(self, view: CacheView):
        recent = (view.age <= 2) | (view.position < 1)
        worth = view.state(self.Decayed) - self.half * view.uniform() + view.rank.float() * 1e-3
        return torch.where(recent, torch.full_like(worth, inf), worth.clamp(min=-1.0, max=7.5))
