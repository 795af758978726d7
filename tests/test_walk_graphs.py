"""Chunks of a walk as CUDA graphs, on a CPU: Triton's interpreter runs the kernels, and stand-ins replay them."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, nll, tokens_of
from factories import needs_triton

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import KERNELS, PLAIN_WALK, RAN
from kvbench.harness.engine.model import adopt
from kvbench.harness.kernels import captured, choose, cuda
from kvbench.harness.kernels.captured import PROCESS, replayable
from kvbench.harness.models.families import tiny_model
from kvbench.policies import KeyNorm, Policy
from kvbench.policies.h2o import H2O

pytestmark = pytest.mark.slow("Triton's interpreter")


@pytest.fixture
def captures(monkeypatch) -> list[int]:
    """Walks are replayed in chunks of four tokens. Notes each capture."""
    made: list[int] = []
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)
    monkeypatch.setattr(cuda, "_GRAPH_DEVICES", {DEVICE.type})
    monkeypatch.setattr(cuda, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(cuda, "replayable", lambda launches, device: made.append(1) or launches)
    return made


class OldNorms(Policy):
    """A policy of a statistic that is computed when a token is written."""

    statistics = (KeyNorm(),)

    def importance(self, view):
        return view.state(self.statistics[0]).masked_fill(view.age < 2, torch.inf)


@needs_triton
@pytest.mark.parametrize("policy", [H2O(), OldNorms()], ids=lambda p: type(p).__name__)
def test_a_walk_in_graphs_is_the_plain_one(captures, policy):
    """Blocks longer than the one before and shorter, in whole chunks or not; a fork; filling, full and between."""
    model, tokens = adopt(tiny_model("llama", num_hidden_layers=1).to(DEVICE)), tokens_of(33, 2)
    config = CacheConfig(policy, 7)
    fast, plain = CachedDecoder(model, config, 2, KERNELS), CachedDecoder(model, config, 2, PLAIN_WALK)
    before = RAN["walk in graphs"]
    ours, theirs = (torch.cat([read(x) for x in tokens.split([10, 13, 1, 9], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()
    assert RAN["walk in graphs"] - before >= 4
    one_stream, twin = fast.fork([1]), plain.fork([1])
    for block in tokens[:1, :10].split([5, 5], 1):
        torch.testing.assert_close(one_stream(block), twin(block), atol=2e-4, rtol=0)
    torch.testing.assert_close(fast(tokens[:, :6]), plain(tokens[:, :6]), atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()
    assert one_stream.kept() == twin.kept()
    assert len(captures) <= 4


@needs_triton
def test_a_walk_whose_launches_can_not_be_captured_goes_on(captures, monkeypatch):
    monkeypatch.setattr(cuda, "replayable", lambda launches, device: None)
    model, tokens = adopt(tiny_model("llama", num_hidden_layers=1).to(DEVICE)), tokens_of(14)
    fast, plain = CachedDecoder(model, CacheConfig(H2O(), 5), 1, KERNELS), CachedDecoder(model, CacheConfig(H2O(), 5))
    before = RAN["walk in graphs"]
    torch.testing.assert_close(fast(tokens), plain(tokens), atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()
    assert RAN["walk in graphs"] == before


def test_launches_that_can_not_be_captured_are_made_one_by_one(monkeypatch):
    """And nothing is captured in this process from then on."""
    monkeypatch.setattr(PROCESS, "failed", "")

    def refuses(work, device):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(captured, "recorded", refuses)
    assert replayable(lambda: None, DEVICE) is None
    assert PROCESS.failed == "operation not permitted when stream is capturing"
    monkeypatch.setattr(captured, "recorded", lambda work, device: pytest.fail("another capture"))
    assert replayable(lambda: None, DEVICE) is None
