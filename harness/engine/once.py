"""A decoder that has read a prompt once."""

from __future__ import annotations

from torch import Tensor

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.model import Model


def read_once(
    model: Model, config: CacheConfig, tokens: Tensor, block: int, method: Method = EAGER
) -> tuple[CachedDecoder, Tensor]:
    """A decoder after `read_prompt(..., once=True)`, and its logits."""
    read = CachedDecoder(model, config, tokens.shape[0], method)
    return read, read.read_prompt(tokens, block, once=True)
