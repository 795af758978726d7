"""Broken on purpose: each sabotage of the engine must be noticed by the comparison with the list-based reference."""

import pytest
import torch
from helpers import H2O, CacheConfig, CachedDecoder, SinkWindow, model_of, tokens_of
from reference import ListBackend, after_sinks, lightest

from kvbench.harness.engine.rotary import Placement
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slot_tensors import SlotTensors
from kvbench.policies import AttentionSum

pytestmark = pytest.mark.fast


def agrees(policy=None, capacity: int = 9) -> bool:
    """Whether engine and reference agree on logits and on what is kept, token by token and in blocks."""
    model, tokens = model_of("llama"), tokens_of(40)
    policy = policy or H2O()
    choose = lightest(capacity // 2) if isinstance(policy, H2O) else after_sinks(policy.sinks)
    reference = ListBackend(model, choose, capacity)
    theirs = reference.run(tokens)
    for size in (1, 10):
        read = CachedDecoder(model, CacheConfig(policy, capacity))
        ours = torch.cat([read(block) for block in tokens.split(size, 1)], 1)
        same_kept = [layer[0] for layer in read.kept()] == reference.kept[-1]
        if not same_kept or (ours - theirs).abs().max() > 1e-4:
            return False
    return True


@pytest.mark.parametrize("policy", [H2O(), SinkWindow(2)], ids=str)
def test_unbroken_they_agree(policy):
    assert agrees(policy)


def test_positions_off_by_one_for_keys(monkeypatch: pytest.MonkeyPatch):
    plain = Placement.of_keys
    monkeypatch.setattr(Placement, "of_keys", lambda self, *given: plain(self, *given).roll(1, -2))
    assert not agrees()


def test_the_wrong_slot_evicted(monkeypatch: pytest.MonkeyPatch):
    plain = Rows._evict

    def evict(self: Rows, ragged: bool) -> None:
        importance = type(self._slots.policy).importance
        monkeypatch.setattr(type(self._slots.policy), "importance", lambda p, view: -importance(p, view))
        plain(self, ragged)
        monkeypatch.setattr(type(self._slots.policy), "importance", importance)

    monkeypatch.setattr(Rows, "_evict", evict)
    assert not agrees()


def test_ranks_not_closed_up_after_eviction(monkeypatch: pytest.MonkeyPatch):
    plain = Rows._evict

    def evict(self: Rows, ragged: bool) -> None:
        before = self.rank.clone()
        plain(self, ragged)
        self.rank.copy_(torch.where(self.rank == self._slots.empty_rank, self.rank, before))

    monkeypatch.setattr(Rows, "_evict", evict)
    assert not agrees(SinkWindow(2))


def test_scores_not_accumulated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AttentionSum, "update", lambda self, state, attention, view: attention.weights.sum(2))
    assert not agrees()


def test_scores_not_reset_with_the_slot(monkeypatch: pytest.MonkeyPatch):
    plain = SlotTensors.__init__

    def init(self: SlotTensors, *stores, **tensors) -> None:
        plain(self, *stores, **tensors)
        self.flat_states = {}

    monkeypatch.setattr(SlotTensors, "__init__", init)
    assert not agrees()
