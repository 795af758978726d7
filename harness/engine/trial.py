"""One way of reading beside another on the same tokens: whether they agree, what each made use of, and which is faster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.core.device import free_bytes, wait_for
from kvbench.harness.engine.beside import Beside, is_exact, rounding_of
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.flex import TILE
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import PLAIN_WALK, RAN, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.slots import Slots

_EVICTING_TOKENS = 256  # read after the cache is full
_EVICTING_TOKENS_16_BITS = 32
_BLOCK_TOKENS = 128
_SINGLE_TOKENS = 8  # read one by one at the end
_CODED_BLOCK_TOKENS = 12  # read before that in a coded cache; four evict
_SHORT_CYCLE = 4  # tokens evicted at once: up to this many, three cycles are read one by one; above it, only their ends
_DENSE_TOKENS = 64  # read before that, where there is no capacity to fill
_PROMPT_CAPACITY, _PROMPT_TOKENS, _PROMPT_BLOCK = 96, 64, 72  # the second is what the prompt has over the first
_OTHER_VICTIMS, _OTHER_VICTIMS_16_BITS = 0.02, 0.25  # shares; rounding was measured to change none of 80,000, and 3 %

TIMED_DEVICES = {"cuda"}  # on a CPU a kernel is always the faster one (docs/performance.md)
_TIMED_BLOCK_TOKENS = 64
_TIMED_BLOCKS = 3
_CLEARLY = 3  # times as fast: one pair of blocks is enough
_ROOM_TOKENS = 32  # that a cache filled with random numbers lacks when the first block comes
_CACHES_PER_FREE_MEMORY = 4  # two caches are compared, and take no more than half of it
_CACHES_PER_FREE_MEMORY_16_BITS = 12  # four, and one in 32 bits
_MOST_NOISE = 5.0  # units of rounding: where that changes so much, a comparison tells nothing


class Trial(NamedTuple):
    """What came of one method beside the plain walk.

    Attributes:
        refused: why it can't be used: an error, other logits, or other tokens kept; empty if it can.
        slow_blocks: that its blocks take longer than plain ones; empty if they don't, or were not timed.
        slow_steps: the same of its single tokens.
        ran: shortcuts that answered while the two were compared, as in `RAN`.
        eager_because: why steps were not captured, though they should have been; empty otherwise.
    """

    refused: str = ""
    slow_blocks: str = ""
    slow_steps: str = ""
    ran: Mapping[str, int] = MappingProxyType({})
    eager_because: str = ""


class Bench:
    """Tries methods on one cell.

    Attributes:
        worst: largest difference found so far, over what is allowed.
    """

    def __init__(self, model: Model, config: CacheConfig, streams: int) -> None:
        self._model, self._config = model, config
        self._timed = model.device.type in TIMED_DEVICES
        self._exact = is_exact(model.dtype)
        self._streams = 1
        if self._timed:
            caches = _CACHES_PER_FREE_MEMORY if self._exact else _CACHES_PER_FREE_MEMORY_16_BITS
            fitting = free_bytes(model.device) // (caches * model.kv_bytes(config.capacity or _DENSE_TOKENS))
            self._streams = max(1, min(streams, fitting))
        self._filled = max(0, config.capacity - _ROOM_TOKENS) if self._timed and config.capacity is not None else 0
        self.worst = 0.0

    def trial(self, method: Method) -> Trial:
        """Compare a method with the plain walk, and time both where a kernel may be slower."""
        before = Counter(RAN)
        try:
            fast, plain = self._decoder(method), self._decoder(PLAIN_WALK)
            seen, blocks = self._filled, self._block_sizes(fast)
            sizes = [*blocks, *self._single_sizes(fast, seen + sum(blocks))]
            if self._exact or self._model.shares_caches:
                refused = self._differ(fast, plain, sizes, seen)
            else:
                refused = self._differ_by_layer(fast, plain, method, sizes)
            ran = RAN - before
            if refused or not self._timed:
                return Trial(refused, ran=ran)
            slow = "" if blocks_by(fast) == blocks_by(plain) else self._slower("block", self._timed_tokens(fast), fast, plain)
            slow_steps = self._slower("step", 1, fast, plain)
        except Exception as error:  # a kernel or a graph may ask for what the device can't do
            return self._failed(error)
        return Trial("", slow, slow_steps, ran, fast.graphs.refused if fast.graphs else "")

    def trial_of_runs(self) -> str:
        """Why tokens can't be read in runs from one eviction to the next; empty if they can. Both sides are plain PyTorch."""
        config = self._config
        seen = (config.capacity or 0) + max(0, config.every - _SINGLE_TOKENS)
        try:
            fast, plain = (CachedDecoder(self._model, config, 1, method) for method in (PLAIN_WALK, TOKEN_BY_TOKEN))
            sizes = [_ROOM_TOKENS, *[1] * _SINGLE_TOKENS]
            for read in (fast, plain):
                read.fill_randomly(seen)
            if self._exact or self._model.shares_caches or config.kv is not None:
                return self._differ(fast, plain, sizes, seen)
            wide = self._wide(plain, TOKEN_BY_TOKEN, seen)
            for read in (fast, plain, *wide):
                read.reserve(sum(sizes))
            return self._beside(fast, plain, sizes, seen, *wide)
        except Exception as error:
            return self._failed(error).refused

    def trial_of_codes(self, method: Method) -> Trial:
        """Compare a block and single tokens of a coded cache with the plain walk's, layer by layer, and the tokens kept.

        Rounding flips a code here and there, which changes all that is computed later. So in every layer both take in the same
        query, key and value.
        """
        config, before = self._config, Counter(RAN)
        sizes = [_CODED_BLOCK_TOKENS, *[1] * _SINGLE_TOKENS]
        seen = max(0, config.capacity + config.every - _CODED_BLOCK_TOKENS + 4) if config.capacity else _DENSE_TOKENS
        try:
            fast, plain = (CachedDecoder(self._model, config, 1, m) for m in (method, PLAIN_WALK))
            for read in (fast, plain):
                read.fill_randomly(seen)
                read.reserve(sum(sizes))
            return Trial(self._beside(fast, plain, sizes, seen), ran=RAN - before)
        except Exception as error:
            return self._failed(error)

    def trial_of_prompt(self) -> str:
        """Why a prompt that is cut can't be read in one go; empty if it can. A short one is cut to few tokens."""
        capacity = self._config.capacity
        try:
            try:
                return self._prompts_differ(None if capacity is None else min(capacity, _PROMPT_CAPACITY))
            except ValueError:  # the policy needs more
                return self._prompts_differ(capacity)
        except Exception as error:
            return self._failed(error).refused

    def _prompts_differ(self, capacity: int | None) -> str:
        """In what a prompt that is cut to this capacity differs, read in one go and token by token; empty if in nothing."""
        config, tokens = replace(self._config, capacity=capacity), (capacity or 0) + _PROMPT_TOKENS
        fast, plain = (CachedDecoder(self._model, config, 1, method) for method in (PLAIN_WALK, TOKEN_BY_TOKEN))
        for read in (fast, plain):
            read.read_prompt(self._tokens(tokens, 1), _PROMPT_BLOCK)
        return self._differ(fast, plain, [1] * _SINGLE_TOKENS, tokens)

    def _failed(self, error: Exception) -> Trial:
        self.worst = torch.inf
        return Trial(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])

    def _decoder(self, method: Method) -> CachedDecoder:
        """A decoder that captures its second step; its cache is filled where reading is slow."""
        read = CachedDecoder(self._model, self._config, self._streams, method)
        if read.graphs is not None:
            read.graphs = read.graphs.fresh(after=1)
        if self._filled:
            read.fill_randomly(self._filled)
        return read

    def _block_sizes(self, fast: CachedDecoder) -> list[int]:
        """Tokens of the blocks that are compared."""
        exact = self._exact or any(w.has_closed_form for w in fast.walks)
        if self._timed and self._config.capacity is not None:
            odd = [_TIMED_BLOCK_TOKENS] * any(w.may_flex for w in fast.walks)  # which FlexAttention leaves to plain code
            return [self._timed_tokens(fast)] * (1 + exact) + odd
        whole, remainder = divmod(_EVICTING_TOKENS if exact else _EVICTING_TOKENS_16_BITS, _BLOCK_TOKENS)
        return [self._config.capacity or _DENSE_TOKENS, *[_BLOCK_TOKENS] * whole, *[remainder] * (remainder > 0)]

    def _timed_tokens(self, fast: CachedDecoder) -> int:
        """Tokens of a block that every shortcut in question takes: FlexAttention takes whole tiles."""
        return TILE if any(w.may_flex for w in fast.walks) else _TIMED_BLOCK_TOKENS

    def _single_sizes(self, fast: CachedDecoder, seen: int) -> list[int]:
        """Single tokens after `seen` others; between them blocks, where evictions are far apart.

        Steps with evictions and steps without come three times each: for a dry run, a capture and a replay.
        """
        cadence = fast.walks[0].slots.cadence
        if cadence.every <= _SHORT_CYCLE:
            return [1] * max(_SINGLE_TOKENS, 3 * cadence.every)
        sizes = list[int]()
        for _ in range(3):
            gap = next(n for n in range(cadence.origin + cadence.every) if cadence.evicts(seen + n + 2))
            sizes += [*[gap] * (gap > 0), *[1] * _SHORT_CYCLE]
            seen += gap + _SHORT_CYCLE
        return sizes

    def _tokens(self, count: int, streams: int) -> Tensor:
        """Random tokens. [B, count] int64."""
        vocabulary = self._model.hf.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(1)
        return torch.randint(vocabulary, (streams, count), generator=generator).to(self._model.device)

    def _beside(
        self, fast: CachedDecoder, plain: CachedDecoder, sizes: Sequence[int], seen: int, wide: CachedDecoder | None = None
    ) -> str:
        """Read blocks by both, each layer with the queries, keys and values of the plain one. Says in what they differ.

        wide: a decoder with a cache in float32, whose attention counts as exact: both may be off by rounding, the fast one by
            twice as much as the plain one. None: the plain one's counts as exact.
        """
        walks = [plain.walks, fast.walks, *([] if wide is None else [wide.walks])]
        beside = [Beside(*together) for together in zip(*walks, strict=True)]
        plain.walks = [*beside]
        for block in self._tokens(sum(sizes), plain.streams).split(list(sizes), 1):
            plain(block)
        verdicts = [walk.verdict() for walk in beside]
        noise, worst = max(x.noise for x in verdicts), max(x.worst for x in verdicts)
        self.worst = max(self.worst, worst)
        if noise > _MOST_NOISE:
            return f"rounding changes attention by {noise:.1f} times what is allowed"
        if not all(x.compared for x in verdicts):
            return "no head of a layer could be compared with the plain walk's"
        if worst > 1:
            return "its attention differs from the plain walk's"
        return self._others(fast, plain, seen + sum(sizes))

    def _wide(self, plain: CachedDecoder, method: Method, seen: int) -> list[CachedDecoder]:
        """A decoder with a cache in float32; none where statistics take in keys and values: they multiply them with weights."""
        if any(walk.notes_written for walk in plain.walks):
            return []
        wide = CachedDecoder(self._model, self._config, plain.streams, method, torch.float32)
        if seen:
            wide.fill_randomly(seen)
        return [wide]

    def _differ_by_layer(self, fast: CachedDecoder, plain: CachedDecoder, method: Method, sizes: Sequence[int]) -> str:
        """In what a method in 16 bits differs from the plain walk; empty if in nothing.

        Rounding grows from layer to layer: in the logits of a deep model with random weights to a tenth of the largest. So
        attention is compared in every layer, and steps that are captured with the same that aren't. Where their code is compiled
        as a whole, they may differ by twice what kernels and plain walk, which agree in every layer, differ in their logits.
        """
        seen, eager = self._filled, replace(method, captured=False, fused=False)
        kernels, walked = self._decoder(eager), self._decoder(PLAIN_WALK)
        wide = self._wide(walked, PLAIN_WALK, seen)
        for read in (kernels, walked, *wide):
            read.reserve(sum(sizes))
        refused = self._beside(kernels, walked, sizes, seen, *wide)
        if refused or not (self._timed or fast.graphs):
            return refused
        del kernels, walked, wide
        noise, apart = self._differences([self._decoder(eager), plain, fast], sizes)
        if fast.graphs is None:
            return ""
        if method.fused and noise > _MOST_NOISE:
            return f"rounding changes logits by {noise:.1f} times what is allowed"
        apart /= max(1.0, 2 * noise) if method.fused else 1.0
        self.worst = max(self.worst, apart)
        return "its logits differ from those of steps that are not captured" if apart > 1 else ""

    def _differ(self, fast: CachedDecoder, plain: CachedDecoder, sizes: Sequence[int], seen: int) -> str:
        """Read blocks of these sizes by both, after `seen` tokens. Says in what they differ; empty if they agree."""
        (worst,) = self._differences([plain, fast], sizes)
        self.worst = max(self.worst, worst)
        if worst > 1:
            return "its logits differ from the plain walk's"
        return self._others(fast, plain, seen + sum(sizes))

    def _differences(self, reads: Sequence[CachedDecoder], sizes: Sequence[int]) -> list[float]:
        """Largest difference of the others' logits from the first one's, in units of rounding; all read blocks of these sizes."""
        model, worst = self._model, [0.0] * (len(reads) - 1)
        for block in self._tokens(sum(sizes), reads[0].streams).split(list(sizes), 1):
            keep = None
            if block.shape[1] > 1:
                keep = torch.arange(max(0, block.shape[1] - _BLOCK_TOKENS), block.shape[1], device=model.device)
            expected, *logits = (read(block, keep=keep).float() for read in reads)
            rounding = rounding_of(model.dtype) * expected.abs().amax().clamp(min=1)
            apart = [float(((x - expected).abs().amax() / rounding).nan_to_num(torch.inf)) for x in logits]
            worst = [max(pair) for pair in zip(worst, apart, strict=True)]
        return worst

    def _others(self, fast: CachedDecoder, plain: CachedDecoder, seen: int) -> str:
        """Says how many of the tokens evicted, after `seen` tokens, are others; empty if few."""
        allowed = _OTHER_VICTIMS if self._exact else _OTHER_VICTIMS_16_BITS
        others = _other_victims(fast, plain, seen)
        return f"{others:.0%} of the tokens it evicts are others than the plain walk's" if others > allowed else ""

    def _slower(self, what: str, tokens: int, fast: CachedDecoder, plain: CachedDecoder) -> str:
        """Says how long a block or a step takes if the plain one takes less; empty if it doesn't. They take turns."""
        block = torch.zeros(self._streams, tokens, dtype=torch.int64, device=self._model.device)
        keep = None if tokens == 1 else torch.full((1,), tokens - 1, device=self._model.device)
        seconds: list[list[float]] = [[], []]
        for _ in range(_SINGLE_TOKENS if tokens == 1 else _TIMED_BLOCKS):
            for read, of_decoder in zip((fast, plain), seconds, strict=True):
                wait_for(self._model.device)
                start = time.perf_counter()
                read(block, keep=keep)
                wait_for(self._model.device)
                of_decoder.append(time.perf_counter() - start)
            if tokens > 1 and seconds[0][0] * _CLEARLY < seconds[1][0]:
                break
        ours, plainly = (1e3 * median(of_decoder) for of_decoder in seconds)
        return f"a {what} takes {ours:.3g} ms, and {plainly:.3g} ms plainly" if ours > plainly else ""


def blocks_by(read: CachedDecoder) -> str:
    """How a decoder reads blocks, as in `FastCheck`. Where layers share K and V, a token passes all layers before the next."""
    if any(w.slots.shape.lags for w in read.walks):
        return "walk"
    if read.config.policy.evicts and any(w.slots.shape.readers > 1 and not w.has_closed_form for w in read.walks):
        return "walk"
    if any(w.has_closed_form for w in read.walks) or not read.config.policy.evicts:
        return "closed form"
    return "compiled walk" if any(w.is_compiled for w in read.walks) else "walk"


def _other_victims(fast: CachedDecoder, plain: CachedDecoder, seen: int) -> float:
    """Share of the tokens that the plain decoder has evicted, after `seen` tokens, which the other one still holds."""
    others = evicted = 0
    for ours, theirs in zip(fast.walks, plain.walks, strict=True):
        held = [_held(walk.slots, seen) for walk in (ours, theirs)]
        others += int((held[0] & ~held[1]).sum())
        evicted += int((~held[1]).sum())
    return others / max(evicted, 1)


def _held(slots: Slots, seen: int) -> Tensor:
    """Which of the first `seen` tokens each row holds. [R, seen] bool."""
    position, rank = slots.tensors.position, slots.tensors.rank
    at = position.masked_fill(rank == slots.empty_rank, seen)  # an empty slot counts as none of them
    return torch.zeros(len(at), seen + 1, dtype=torch.bool, device=at.device).scatter_(1, at, value=True)[:, :seen]
