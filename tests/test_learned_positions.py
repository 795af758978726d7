"""Models whose tokens get positions as they enter, as GPT-2's do: kept tokens stay where they stood, and nothing else differs."""

from __future__ import annotations

import pytest
import torch
from conftest import tokens_of

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.method import FASTEST
from kvbench.harness.engine.model import adopt
from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.models.families import tiny_model
from kvbench.policies.h2o import H2O
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.window import Window

LENGTH, CAPACITY = 40, 12


@pytest.fixture(scope="module", params=["gpt2", "opt"])
def model(request):
    return adopt(tiny_model(request.param).double().cpu())


def own_logits(model, ids, mask=None):
    """The model's own forward pass. mask: which keys each query sees. [T, T] bool."""
    given = {"position_ids": torch.arange(ids.shape[1])[None]}
    if mask is not None:
        given["attention_mask"] = torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf)[None, None]
    with attention_by(model.hf, "eager"), torch.inference_mode():
        return model.hf(input_ids=ids, use_cache=False, **given).logits


@pytest.mark.parametrize("policy", [Window(), SinkWindow(2)])
@pytest.mark.parametrize("method", ["eager", "fastest"])
@pytest.mark.parametrize("block", [1, 7, LENGTH])
def test_evicting_is_masking(model, policy, method, block):
    ids = tokens_of(LENGTH).cpu()
    config = CacheConfig(policy, CAPACITY, positions="stream")
    read = decoder(model, config, 1, *([FASTEST] if method == "fastest" else []))
    ours = torch.cat([read(part) for part in ids.split(block, 1)], 1)
    now, then = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    sinks = getattr(policy, "sinks", 0)
    seen = (then <= now) & ((now - then <= CAPACITY - sinks) | (then < sinks))
    torch.testing.assert_close(ours, own_logits(model, ids, seen), atol=1e-6, rtol=0)


def test_each_window_of_recompute_begins_at_position_0(model):
    ids = tokens_of(LENGTH).cpu()
    ours = decoder(model, CacheConfig(RecomputeWindow(), CAPACITY))(ids)
    for end in (3, CAPACITY + 1, LENGTH):
        window = ids[:, max(0, end - CAPACITY - 1) : end]
        torch.testing.assert_close(ours[:, end - 1], own_logits(model, window)[:, -1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("policy", [H2O(), RecomputeWindow()])
def test_streams_of_unequal_length_are_each_read_as_if_alone(model, policy):
    ids = tokens_of(LENGTH, 2).cpu()
    config = CacheConfig(policy, CAPACITY, positions="stream")
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    valid[1, 5:9] = valid[1, 30:] = False
    both = decoder(model, config, 2)
    together = torch.cat([both(ids[:, part], valid[:, part]) for part in (slice(0, 20), slice(20, LENGTH))], 1)
    alone = decoder(model, config)(ids[1:, valid[1]])
    torch.testing.assert_close(together[1, valid[1]], alone[0], atol=1e-6, rtol=0)
