"""Somebody else's cache in the model's own loop: what it must equal, what is refused, and what its records say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, FAMILIES, in_blocks, model_of, nll, tokens_of
from transformers import DynamicCache

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.core.sources import source_digest
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.foreign import ForeignDecoder
from kvbench.harness.engine.foreigncheck import own_loop
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.method import EAGER, OwnLoop
from kvbench.policies.dense import Dense
from kvbench.policies.window import Window

HALF = '''"""A layer that keeps the newest tokens, and the first."""
from transformers.cache_utils import DynamicLayer
import torch

class Half(DynamicLayer):
    def __init__(self, tokens=32):
        super().__init__()
        self.tokens = tokens

    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values)
        if keys.shape[2] > self.tokens:
            self.keys, self.values = (torch.cat([x[:, :, :1], x[:, :, 1 - self.tokens:]], 2) for x in (keys, values))
        return keys, values
'''


@pytest.fixture
def half(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(HALF)
    return f"{tmp_path / 'mine.py'}:Half"


def contestant(name: str, **parameters: object) -> CacheConfig:
    return CacheConfig(policy_from(name, parameters), positions="stream")


def opened(family: str, name: str, streams: int = 1, blocks: int = 0, **parameters: object) -> ForeignDecoder:
    read = decoder(model_of(family), contestant(name, **parameters), streams, replace(EAGER, own_loop=OwnLoop(blocks=blocks)))
    assert isinstance(read, ForeignDecoder)
    return read


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gemma3_text", "olmo2", "phi3"])
@pytest.mark.parametrize("name", ["hf:DynamicCache", "hf:StaticCache"])
@pytest.mark.parametrize("blocks", [0, 10**6], ids=["steps", "blocks"])
def test_a_cache_that_keeps_everything_equals_dense(family, name, blocks):
    tokens, model = tokens_of(90, 2), model_of(family)
    expected = nll(decoder(model, CacheConfig(Dense()), 2)(tokens), tokens)
    parameters = {"max_cache_len": 90} if "Static" in name else {}
    config = contestant(name, **parameters)
    loop = own_loop(model, config).loop
    assert loop.blocks > 10**6, "its blocks were not found to equal its steps"
    read = decoder(model, config, 2, replace(EAGER, own_loop=loop._replace(blocks=blocks)))
    found = nll(in_blocks(read, tokens, 30), tokens)
    assert (found - expected).abs().max() < 3e-4
    assert abs(found.mean() - expected.mean()) < 1e-5
