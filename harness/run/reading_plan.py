"""Choose the method by which a cell is read, and the number of tokens that pass a layer at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.device import free_bytes, seconds_of
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.engine.budgets import static_table
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import FastCheck, remembered_check
from kvbench.harness.engine.foreigncheck import own_loop
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.report.task_report import OF_MACHINE
from kvbench.harness.tasks.task import Task
from kvbench.policies import Composed, Policy

PLAIN_BLOCK_TOKENS = 256  # block size of the plain walk
MAX_BLOCK_TOKENS = 2048  # maximum block size of the faster methods
LOGITS_SHARE_OF_FREE_MEMORY = 1 / 16
_TIMED_TOKENS = 8
_BETWEEN_RESETS = "full attention between resets"
_FAST = ("closed form", "compiled walk", "full attention", "masks", _BETWEEN_RESETS)  # ways to read blocks of any size


class Reading(NamedTuple):
    """Method and block size chosen for a cell.

    Attributes:
        method: shortcuts that may be used.
        block: number of tokens that pass a layer at once.
        facts: facts about the method, for the record.
        slow: note for the user: the reason that blocks are read token by token, with the speed of the plain walk, or the wrong
            length that a third-party cache returns; empty if there is nothing to note.
    """

    method: Method
    block: int
    facts: dict[str, Any]
    slow: str = ""


def choose_reading(model: Model, config: CacheConfig, task: type[Task], options: Any, block: int | None, walk: bool) -> Reading:
    """Choose the reading of a cell. A faster method is used only if a check on this model shows that it agrees with the walk.

    block, walk: options of the run.
    """
    if isinstance(config.policy, Contestant):
        return _own_reading(model, config, task, options, block, walk)
    facts: dict[str, Any] = {}
    work = task.workload(options)
    way = _BETWEEN_RESETS if holds_kv(config.policy) else "windows run afresh"
    check = FastCheck(TOKEN_BY_TOKEN, way, way, 0.0)
    if config.policy.caches:
        by_walk = FastCheck(TOKEN_BY_TOKEN, "walk", "plain", 0.0)
        check = by_walk if walk else remembered_check(model, config, work.side_by_side, task.measures == "time")
        facts["differs_from_walk"] = round(check.differs, 4) if math.isfinite(check.differs) else None
        facts.update({"refused": check.refused} if check.refused else {})
        facts.update({"plain_because": check.plain_because} if check.plain_because else {})
    is_fast = check.blocks in _FAST and task.measures not in OF_MACHINE
    streams = 1 if work.block_of_all else work.side_by_side
    block = block or (_block_that_fits(model, streams) if is_fast else PLAIN_BLOCK_TOKENS)
    facts.update({"block": block, "method": check.blocks, "step": check.step})
    facts.update({"side_by_side": {"streams": work.side_by_side}} if work.side_by_side < work.kv_streams else {})
    budgets = _kind_of_budgets(model, config)
    facts.update({"budgets": budgets} if budgets else {})
    slow = ""
    if check.blocks == "walk" and not walk and task.measures not in OF_MACHINE:
        timed = model, config, check.method, streams
        speed = _prompt_speed(*timed) if config.evict == "prompt" else block_speed(*timed, _TIMED_TOKENS)
        slow = f"plain walk, about {speed:,.0f} tokens/s ({check.refused or check.plain_because})"
    return Reading(check.method, block, facts, slow)


def _own_reading(model: Model, config: CacheConfig, task: type[Task], options: Any, block: int | None, walk: bool) -> Reading:
    """Choose the reading with a third-party cache. Arguments are those of `choose_reading`."""
    check = own_loop(model, config, walk)
    work = task.workload(options)
    streams = 1 if work.block_of_all else work.side_by_side
    block = block or (_block_that_fits(model, streams) if check.loop.blocks > MAX_BLOCK_TOKENS else PLAIN_BLOCK_TOKENS)
    how = f"the model's own attention ({check.loop.attention})"
    facts = {"block": block, "method": f"{how}, {'token by token' if check.slow else 'in blocks'}", "step": how}
    facts |= {"wrong_length": check.wrong_length} if check.wrong_length else {}
    facts |= {"plain_because": check.slow} if check.slow else {}
    slow = f"token by token: {check.slow}" if check.slow and not walk else ""
    return Reading(replace(EAGER, own_loop=check.loop), block, facts, "; ".join(filter(None, [slow, check.wrong_length])))


def block_speed(model: Model, config: CacheConfig, method: Method, streams: int, count: int) -> float:
    """Measure tokens per second over all streams, in a block of `count` tokens with a full cache."""
    read = CachedDecoder(model, config, streams, method)
    read.fill_randomly(config.capacity or 0)
    tokens = torch.zeros(streams, count, dtype=torch.int64, device=model.device)
    return tokens.numel() / min(seconds_of(lambda: read(tokens), model.device) for _ in range(2))  # the first one warms up


def _prompt_speed(model: Model, config: CacheConfig, method: Method, streams: int) -> float:
    """Measure tokens per second over all streams for a prompt that is longer than the cache and cut at its end."""
    tokens = torch.zeros(streams, (config.capacity or 0) + _TIMED_TOKENS, dtype=torch.int64, device=model.device)
    read = lambda: CachedDecoder(model, config, streams, method).read_prompt(tokens, PLAIN_BLOCK_TOKENS)  # noqa: E731
    return tokens.numel() / seconds_of(read, model.device)


def _block_that_fits(model: Model, streams: int) -> int:
    """Return the block size of a faster method: the largest power of two whose logits take a small share of free memory."""
    vocabulary = int(getattr(model.hf.config.get_text_config(), "vocab_size", 1))  # vision transformers have none
    logit_bytes = 3 * 4 * vocabulary  # of a token: float32, and two copies in the loss
    fitting = int(LOGITS_SHARE_OF_FREE_MEMORY * free_bytes(model.device) / (streams * logit_bytes))
    return max(PLAIN_BLOCK_TOKENS, min(MAX_BLOCK_TOKENS, 2 ** max(0, fitting.bit_length() - 1)))


def _kind_of_budgets(model: Model, config: CacheConfig) -> str | None:
    """Return the reason that heads hold different numbers of tokens: "table", "pool" or "prompt"; None if they don't."""
    policy = config.policy if config.capacity is None else config.policy.bind(config.capacity)
    if config.capacity is not None and policy.caches and static_table(model, config, None) is not None:
        return "table"
    if config.capacity is not None and policy.pool_floor(config.capacity) is not None:
        return "pool"
    return "prompt" if _asks_the_prompt(policy) else None


def _asks_the_prompt(policy: Policy) -> bool:
    """Return whether the policy, or the policy that scores for it, computes budgets from a prompt."""
    answers = type(policy).prompt_budgets
    if isinstance(policy, Composed) and answers is Composed.prompt_budgets:
        return _asks_the_prompt(policy.score)
    return answers is not Policy.prompt_budgets
