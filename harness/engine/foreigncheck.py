"""Check how somebody else's cache may be read: in blocks only if single tokens give the same results.

A cache that evicts gives other results in blocks, because every token of a block sees the tokens that the last one evicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.errors import described
from kvbench.harness.core.presses import Press
from kvbench.harness.engine.comparison import relative_difference, rounding_of
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.foreign import ForeignDecoder, usual_attention
from kvbench.harness.engine.method import EAGER, OwnLoop
from kvbench.harness.engine.model import Model, random_tokens
from kvbench.harness.engine.own_attention import attention_by

_BLOCKS = (16, 48)  # tokens
_TOKENS = 96  # read by a cache of transformers; later blocks are trusted
_TOKENS_OF_OTHERS = 256  # read by any other cache; it may start to evict later, so later tokens are read one by one
_ALL = 2**62


@dataclass(frozen=True)
class OwnLoopCheck:
    """Result of a contestant's check.

    Attributes:
        slow: reason that tokens are read one by one; empty if blocks give the same results.
        wrong_length: message that the cache reports a wrong length; None if the length is right.
    """

    loop: OwnLoop
    slow: str = ""
    wrong_length: str | None = None


@torch.inference_mode()
def own_loop(model: Model, config: CacheConfig, walk: bool = False) -> OwnLoopCheck:
    """Check on random tokens whether blocks agree with single tokens. walk: always read tokens one by one."""
    read = ForeignDecoder(model, config)
    policy = config.policy
    assert isinstance(policy, Contestant)
    is_trusted = issubclass(policy.named_class, Cache) and not policy.modules and not hasattr(policy, "backend")
    tokens = int(min(_TOKENS if is_trusted else _TOKENS_OF_OTHERS, read.longest))
    ids = random_tokens(model.hf, 1, tokens, seed=1)
    usual = usual_attention(model.hf, policy)
    loop = OwnLoop(usual if policy.attention is not None else agreeing_attention(model.hf, usual, ids))
    singly = ForeignDecoder(model, config, method=replace(EAGER, own_loop=loop))
    if isinstance(policy, Press):
        singly.read_prompt(ids[:, :-1], tokens)
        singly(ids[:, -1:])
        return OwnLoopCheck(loop, "kvpress' hooks tell a prompt by the length of a block", _wrong_length(singly, tokens))
    try:
        expected = singly(ids).float()
    except Exception as error:  # a user's cache may raise anything; it may still be able to read a whole prompt
        return OwnLoopCheck(loop, f"single tokens without a prompt: {described(error)}")
    wrong = _wrong_length(singly, tokens)
    if walk:
        return OwnLoopCheck(loop, "as asked", wrong)
    in_blocks = OwnLoop(loop.attention, tokens)
    for size in _BLOCKS:
        try:
            other = ForeignDecoder(model, config, method=replace(EAGER, own_loop=in_blocks))
            logits = torch.cat([other(block) for block in ids.split(size, 1)], 1).float()
        except Exception as error:  # a user's cache may raise anything
            return OwnLoopCheck(loop, f"blocks of {size} tokens: {described(error)}", wrong)
        if relative_difference(logits, expected) > rounding_of(model.dtype) or other.held_bytes != singly.held_bytes:
            return OwnLoopCheck(loop, f"blocks of {size} tokens give other results than single tokens", wrong)
    return OwnLoopCheck(in_blocks._replace(blocks=_ALL) if is_trusted else in_blocks, "", wrong)


def _wrong_length(read: ForeignDecoder, tokens: int) -> str | None:
    length = int(read.cache.get_seq_length())
    return None if length == tokens else f"get_seq_length says {length} after {tokens} tokens"


def agreeing_attention(hf: PreTrainedModel, usual: str, ids: Tensor) -> str:
    """Return the usual attention, unless it differs from `eager`, as with some families' softcap."""
    if usual == "eager":
        return usual
    logits = []
    for name in (usual, "eager"):
        with attention_by(hf, name):
            logits.append(hf(input_ids=ids, use_cache=False).logits.float())
    return usual if relative_difference(logits[0], logits[1]) <= rounding_of(hf.dtype) else "eager"
