"""Chooses how a cell is read: by which method, how many tokens at once, and how many independent streams side by side.

Streams that are independent give the same figures in any number at once, so the number is a fact of the machine and no part of
the cell. It is found by a short trial, which reads random tokens with full caches, twice as many streams each time, until the
next would not fit or reading gets no faster, twice running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from kvbench.harness.core.contestants import Contestant
from kvbench.harness.core.device import free_bytes, wait_for
from kvbench.harness.core.errors import ran_out_of_memory
from kvbench.harness.core.resets import holds_kv
from kvbench.harness.engine.budgets import static_table
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import FastCheck, remembered_check
from kvbench.harness.engine.foreigncheck import own_loop
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.recompute import MAX_BATCH_TOKENS
from kvbench.harness.tasks.task import Independent, Task
from kvbench.policies import Composed, Policy

PLAIN_BLOCK_TOKENS = 256  # block size of the plain walk
MAX_BLOCK_TOKENS = 2048  # of the faster methods
LOGITS_SHARE_OF_FREE_MEMORY = 1 / 16
_TIMED_TOKENS = 8
MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of what is free; the rest is for what the trial doesn't see, and other processes
MIN_GAIN = 1.05  # in tokens per second, over the best so far
MAX_MISSES = 2  # numbers without that gain, one after another, that end the search; a single one may be noise
_TIMED_READS = 2  # after one that warms up
_ACTIVATIONS = 16  # hidden vectors of a token that are held at once, roughly; on a CPU nothing counts them
_BETWEEN_RESETS = "full attention between resets"
_FAST = ("closed form", "compiled walk", "full attention", _BETWEEN_RESETS)  # ways to read blocks of any size


class Reading(NamedTuple):
    """How a cell is read.

    Attributes:
        method: the shortcuts that may be used.
        block: tokens that pass a layer at once.
        facts: of the record.
        slow: why blocks are read by the plain walk, and how fast; empty if they are not, or were to be.
    """

    method: Method
    block: int
    facts: dict[str, Any]
    slow: str = ""


def choose_reading(model: Model, config: CacheConfig, task: type[Task], options: Any, block: int | None, walk: bool) -> Reading:
    """The reading of a cell: faster than the plain walk only if a check on this model found that both agree.

    `block` and `walk` are the options of the run.
    """
    if isinstance(config.policy, Contestant):
        return _own_reading(model, config, task, options, block, walk)
    facts: dict[str, Any] = {}
    way = _BETWEEN_RESETS if holds_kv(config.policy) else "windows run afresh"
    check = FastCheck(TOKEN_BY_TOKEN, way, way, 0.0)
    if config.policy.caches:
        by_walk = FastCheck(TOKEN_BY_TOKEN, "walk", "plain", 0.0)
        check = by_walk if walk else remembered_check(model, config, task.at_once(options), task.times_steps)
        facts["differs_from_walk"] = round(check.differs, 4) if math.isfinite(check.differs) else None
        facts.update({"refused": check.refused} if check.refused else {})
        facts.update({"plain_because": check.plain_because} if check.plain_because else {})
    is_fast = check.blocks in _FAST and not task.of_device
    streams = 1 if task.block_of_all else task.at_once(options)
    block = block or (_block_that_fits(model, streams) if is_fast else PLAIN_BLOCK_TOKENS)
    facts.update({"block": block, "method": check.blocks, "step": check.step})
    budgets = _kind_of_budgets(model, config)
    facts.update({"budgets": budgets} if budgets else {})
    slow = ""
    if check.blocks == "walk" and not walk and not task.of_device:
        speed = _walk_speed(model, config, check.method, streams)
        slow = f"plain walk, about {speed:,.0f} tokens/s ({check.refused or check.plain_because})"
    return Reading(check.method, block, facts, slow)


def _own_reading(model: Model, config: CacheConfig, task: type[Task], options: Any, block: int | None, walk: bool) -> Reading:
    """The reading of somebody else's cache. The arguments are those of `choose_reading`."""
    check = own_loop(model, config, walk)
    streams = 1 if task.block_of_all else task.at_once(options)
    block = block or (_block_that_fits(model, streams) if check.loop.blocks > MAX_BLOCK_TOKENS else PLAIN_BLOCK_TOKENS)
    how = f"the model's own attention ({check.loop.attention})"
    facts = {"block": block, "method": f"{how}, {'token by token' if check.slow else 'in blocks'}", "step": how}
    facts |= {"wrong_length": check.wrong_length} if check.wrong_length else {}
    facts |= {"plain_because": check.slow} if check.slow else {}
    slow = f"token by token: {check.slow}" if check.slow and not walk else ""
    return Reading(replace(EAGER, own_loop=check.loop), block, facts, "; ".join(filter(None, [slow, check.wrong_length])))


def _walk_speed(model: Model, config: CacheConfig, method: Method, streams: int) -> float:
    """Tokens per second of all streams, with a full cache; where the prompt is cut, of a prompt longer than the cache."""
    if config.evict == "prompt":
        return _prompt_speed(model, config, method, streams)
    read = CachedDecoder(model, config, streams, method)
    read.fill_randomly(config.capacity or 0)
    tokens = torch.zeros(streams, _TIMED_TOKENS, dtype=torch.int64, device=model.device)
    return tokens.numel() / min(_seconds(model.device, lambda: read(tokens)) for _ in range(2))  # the first one warms up


def _prompt_speed(model: Model, config: CacheConfig, method: Method, streams: int) -> float:
    """Tokens per second of all streams while a prompt is read that is cut at its end."""
    tokens = torch.zeros(streams, (config.capacity or 0) + _TIMED_TOKENS, dtype=torch.int64, device=model.device)
    read = lambda: CachedDecoder(model, config, streams, method).read_prompt(tokens, PLAIN_BLOCK_TOKENS)  # noqa: E731
    return tokens.numel() / _seconds(model.device, read)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def _block_that_fits(model: Model, streams: int) -> int:
    """The block size of a faster method: the largest power of two whose logits take a small share of free memory."""
    fitting = int(LOGITS_SHARE_OF_FREE_MEMORY * free_bytes(model.device) / (streams * _logit_bytes(model)))
    return max(PLAIN_BLOCK_TOKENS, min(MAX_BLOCK_TOKENS, 2 ** max(0, fitting.bit_length() - 1)))


def _kind_of_budgets(model: Model, config: CacheConfig) -> str | None:
    """Why heads hold different numbers of tokens: "table", "pool" or "prompt"; None if they don't."""
    policy = config.policy if config.capacity is None else config.policy.bind(config.capacity)
    if config.capacity is not None and policy.caches and static_table(model, config, None) is not None:
        return "table"
    if config.capacity is not None and policy.pool_floor(config.capacity) is not None:
        return "pool"
    return "prompt" if _asks_the_prompt(policy) else None


def _asks_the_prompt(policy: Policy) -> bool:
    """Whether the policy, or one that answers for it, computes budgets from a prompt."""
    answers = type(policy).prompt_budgets
    if isinstance(policy, Composed) and answers is Composed.prompt_budgets:
        return _asks_the_prompt(policy.score)
    return answers is not Policy.prompt_budgets


class StreamsTrial(NamedTuple):
    """What a number of streams at once took.

    Attributes:
        stream_bytes: of memory for each stream, caches at their largest included.
        tokens_per_second: of all streams together.
    """

    stream_bytes: int
    tokens_per_second: float


@dataclass(frozen=True)
class Chosen:
    """How many streams are read at once.

    Attributes:
        streams: at once; None if that is part of what is measured, so that the task knows.
        block: tokens of a stream that pass a layer at once.
        facts: of the record.
    """

    streams: int | None
    block: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class StreamReading:
    """How the streams of a cell are read.

    Attributes:
        model: of the cell.
        config: of its cache.
        method: shortcuts that decoders take.
        block: tokens that pass a layer at once, with one stream.
        keeps_block: the same number of tokens of each stream pass a layer at once, however many streams there are.
        divides_block: it is the number of tokens of all streams together.
    """

    model: Model
    config: CacheConfig
    method: Method
    block: int
    keeps_block: bool = False
    divides_block: bool = False

    def block_for(self, streams: int) -> int:
        """Tokens of each stream that pass a layer at once. The logits of faster methods don't grow with the streams."""
        if self.divides_block:
            return max(1, self.block // streams)
        return self.block if self.keeps_block else min(self.block, max(PLAIN_BLOCK_TOKENS, self.block // streams))


def choose_side_by_side(reading: StreamReading, independent: Independent | None, keep_map: bool = False) -> Chosen:
    """The number of streams that are read at once.

    `independent` is None if their number at once is part of what is measured. A keep map needs one decoder with all streams.
    """
    if independent is None:
        return Chosen(None, reading.block, {})
    count = independent.count
    trials: dict[int, StreamsTrial] = {}
    limit = None
    if keep_map:
        streams, because = count, "a keep map holds all streams"
    elif independent.at_once is not None:
        streams, because = min(count, independent.at_once), "as the suite says"
    elif len(reading.model.devices) > 1:
        streams, because = 1, "the model is on several devices, whose memory no trial counts"
    elif isinstance(reading.config.policy, Contestant):
        streams, because = 1, "somebody else's cache, which no trial can fill"
    elif not reading.config.policy.caches:
        assert reading.config.capacity is not None
        streams = min(count, max(1, MAX_BATCH_TOKENS // (reading.config.capacity + 1)))
        because = f"{'' if holds_kv(reading.config.policy) else 'no cache: '}as many as one pass has windows"
    else:
        _release(reading.model.device)
        limit = int(MEMORY_SHARE.get(reading.model.device.type, 0.5) * free_bytes(reading.model.device))
        streams, because = search(count, limit, partial(_trial, reading, independent), trials)
        streams = -(-count // -(-count // streams))  # as many passes, of equal size
    block = reading.block if reading.divides_block else reading.block_for(streams)
    chosen = {"streams": streams, "because": because}
    chosen |= {} if limit is None else {"limit_bytes": limit}
    if trials:
        chosen["trials"] = [
            {"streams": n, "stream_bytes": t.stream_bytes, "tokens_per_second": round(t.tokens_per_second, 1)}
            for n, t in trials.items()
        ]
    return Chosen(streams, block, {"block": block, "side_by_side": chosen})


def search(count: int, limit: int, trial: Callable[[int], StreamsTrial], trials: dict[int, StreamsTrial]) -> tuple[int, str]:
    """The number of streams at once, and why no more.

    They may take `limit` bytes. `trial` reads with a number of streams, and may run out of memory; `trials` gets what each took.
    """
    best, tried, misses = 1, 1, 0
    while True:
        try:
            trials[tried] = trial(tried)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return best, "memory"
        stream_bytes = trials[tried].stream_bytes
        if tried * stream_bytes > limit:
            return best, "memory"
        if tried == 1 or trials[tried].tokens_per_second >= MIN_GAIN * trials[best].tokens_per_second:
            best, misses = tried, 0
        else:
            misses += 1
        following = min(2 * tried, count, limit // max(1, stream_bytes))
        if misses and (misses == MAX_MISSES or following <= tried):
            return best, "more are no faster"
        if following <= tried:
            return best, "all" if best == count else "memory"
        tried = following


def _trial(reading: StreamReading, independent: Independent, streams: int) -> StreamsTrial:
    """Read random tokens with full caches."""
    device = reading.model.device
    _release(device)
    try:
        before = _allocated(device)
        decoder = CachedDecoder(reading.model, reading.config, streams, reading.method)
        bounded = reading.config.capacity is not None and reading.config.evict != "prompt"
        block = min(reading.block_for(streams), max(1, independent.tokens))
        tokens = min(block, max(1, independent.tokens // (1 + _TIMED_READS)))  # of a read: all of them end within a stream
        if reading.config.evict != "prompt":
            read = (1 + _TIMED_READS) * tokens
            decoder.fill_randomly(min(reading.config.capacity or independent.tokens, max(0, independent.tokens - read)))
        speed = _speed(decoder, reading.model, streams, tokens)
        held = decoder.kv_bytes // streams
        largest = held if bounded else max(held, reading.model.kv_bytes(independent.tokens))
        used = _allocated(device, peak=True) - before
        if device.type != "cuda":
            used = decoder.kv_bytes + decoder.state_bytes + streams * tokens * _bytes_per_token(reading.model)
        rest_of_block = (block - tokens) * _bytes_per_token(reading.model)
        return StreamsTrial(-(-used // streams) + largest * independent.caches - held + rest_of_block, speed)
    finally:
        decoder = None  # type: ignore[assignment]
        _release(device)


@torch.inference_mode()
def _speed(decoder: CachedDecoder, model: Model, streams: int, tokens: int) -> float:
    """Tokens per second of all streams, the loss included."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_vocabulary(model), (streams, tokens), generator=generator).to(model.device)
    loss = lambda: cross_entropy(decoder(ids).flatten(0, 1).float(), ids.flatten(), reduction="none")  # noqa: E731
    return ids.numel() / min([_seconds(model.device, loss) for _ in range(1 + _TIMED_READS)][1:])


def _vocabulary(model: Model) -> int:
    return int(getattr(model.hf.config.get_text_config(), "vocab_size", 1))  # vision transformers have none


def _logit_bytes(model: Model) -> int:
    """Bytes of a token's float32 logits, and of two copies in the loss."""
    return 3 * 4 * _vocabulary(model)


def _bytes_per_token(model: Model) -> int:
    """Bytes of a token on its way through the model: its logits, and activations."""
    hidden = int(getattr(model.hf.config.get_text_config(), "hidden_size", 0))
    return _logit_bytes(model) + 4 * _ACTIVATIONS * hidden


def _allocated(device: torch.device, peak: bool = False) -> int:
    """Bytes allocated on a GPU, now or at most since the last release; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device))


def _release(device: torch.device) -> None:
    """Free what earlier trials left on a GPU, and count its peak anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
