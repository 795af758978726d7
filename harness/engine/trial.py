"""Check a fast method against the plain walk on the same tokens: logits, kept tokens, shortcuts that ran, and speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.harness.core.device import free_bytes, seconds_of
from kvbench.harness.core.errors import first_line
from kvbench.harness.engine.closed_form import TILE
from kvbench.harness.engine.comparison import (
    LayerInputs,
    ReferenceComparison,
    Row,
    Verdict,
    is_exact,
    record_inputs,
    relative_difference,
    rounding_of,
)
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import PLAIN_WALK, RAN, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model, random_tokens
from kvbench.policies import Selecting

_ATTEMPTS = 3  # comparisons on new tokens, if a head holds other tokens than in the plain walk
_EVICTING_TOKENS = 8  # tokens that evict in the block in which a cache becomes full
_BLOCK_TOKENS, _BLOCK_TOKENS_16_BITS = 64, 32  # of a block whose every token evicts; in 16 bits, heads soon differ
_CLOSED_BLOCK_TOKENS = 160  # of a block in closed form, which computes up to 128 tokens at once
_SINGLE_TOKENS = 8  # read one by one at the end
_CODED_BLOCK_TOKENS = 12  # of a block in a coded cache; four of them evict
_SHORT_CYCLE = 4  # tokens evicted at once: up to this many, three cycles are read one by one; above it, only their ends
_DENSE_TOKENS = 256  # held before the first block, if there is no capacity to fill
_PROMPT_CAPACITY, _PROMPT_TOKENS, _PROMPT_BLOCK = 96, 64, 72  # the prompt has `_PROMPT_TOKENS` more tokens than the capacity
_OTHER_VICTIMS, _OTHER_VICTIMS_16_BITS = 0.02, 0.25  # shares; rounding was measured to change none of 80,000, and 3 %

TIMED_DEVICES = {"cuda"}  # on a CPU a kernel is always the faster one (docs/performance.md)
_TIMED_BLOCK_TOKENS = 64
_TIMED_BLOCKS = 3
BLOCK_METHODS = "closed form", "compiled walk", "compiled steps"  # the fastest first
_CLEARLY = 3  # a method that is this many times faster needs one pair of blocks
_SELECTED_FROM_TOKENS = 1024  # held before the first block, so that a policy that selects leaves some out
_ROOM_TOKENS = 32  # free slots of a randomly filled cache when the first block comes
_CACHES_PER_FREE_MEMORY = 8  # two caches, and perhaps one in 64 bits, take at most half of the memory
_CACHES_PER_FREE_MEMORY_16_BITS = 12
_RECORDED_TOKENS, _RECORDED_PER_TOKEN = 384, 8  # inputs and answers, in multiples of a token's K and V
_ATTENTION_DIFFERS = "its attention differs from the plain walk's"
_MOST_ROUNDING = 5.0  # in units of the tolerance; with more rounding, a comparison proves nothing


class Trial(NamedTuple):
    """Result of comparing a method with the plain walk.

    Attributes:
        refused: reason that the method can't be used: an error, other logits, or other tokens kept; empty if it can.
        slow_blocks: message that the method's blocks are slower than plain blocks; empty if they aren't, or were not timed.
        slow_steps: message that the method's single tokens are slower; empty if they aren't, or were not timed.
        ran: number of runs of each shortcut during the comparison, as in `RAN`.
        eager_because: reason that steps were not captured, although they should have been; empty otherwise.
    """

    refused: str = ""
    slow_blocks: str = ""
    slow_steps: str = ""
    ran: Mapping[str, int] = MappingProxyType({})
    eager_because: str = ""


class MethodCheck:
    """Compares methods with the plain walk on one cell.

    Attributes:
        max_error: largest difference measured so far, relative to the tolerance.
    """

    def __init__(self, model: Model, config: CacheConfig, streams: int) -> None:
        self._model, self._config = model, config
        self._timed = model.device.type in TIMED_DEVICES
        self._exact = is_exact(model.dtype)
        self._streams = 1
        if self._timed:
            self._streams = max(1, min(streams, free_bytes(model.device) // self._bytes_of_stream()))
        room = _ROOM_TOKENS if self._timed else _EVICTING_TOKENS
        self._filled = _DENSE_TOKENS if config.capacity is None else max(0, config.capacity - room)
        self.max_error = 0.0
        self._recorded: list[tuple[Tensor, list[LayerInputs]]] = []

    def _bytes_of_stream(self) -> int:
        """Return the bytes of free memory that each stream of the comparison needs."""
        caches = _CACHES_PER_FREE_MEMORY if self._exact else _CACHES_PER_FREE_MEMORY_16_BITS
        held = caches * self._model.kv_bytes(self._config.capacity or _DENSE_TOKENS)
        return held + _RECORDED_PER_TOKEN * self._model.kv_bytes(_RECORDED_TOKENS)

    def trial(self, method: Method) -> Trial:
        """Compare a method with the plain walk, and time both where a kernel may be slower."""
        before, eager = Counter(RAN), replace(method, captured=False, fused=False)
        try:
            sizes = self._sizes(CachedDecoder(self._model, self._config, 1, method))
            refused = self._differs(eager, PLAIN_WALK, sizes, self._filled, self._streams)
            if refused:
                return Trial(refused, ran=RAN - before)
            fast = self._decoder(method)
            if not (self._timed or fast.graphs):
                return Trial(ran=RAN - before)
            reference = self._decoder(PLAIN_WALK)
            refused, ran = self._differs_captured(fast, reference, method, sizes), RAN - before
            if refused or not self._timed:
                return Trial(refused, ran=ran)
            slow = ""
            if blocks_by(fast) != blocks_by(reference):
                slow = self._slower("block", self._timed_tokens(fast), fast, reference)
            slow_steps = self._slower("step", 1, fast, reference)
        except Exception as error:  # a kernel or a graph may ask for what the device can't do
            return Trial(self._failure(error))
        return Trial("", slow, slow_steps, ran, fast.graphs.refused if fast.graphs else "")

    def trial_of_runs(self) -> str:
        """Return the reason that runs between evictions can't be used; empty if they can. Both sides are plain PyTorch."""
        config = self._config
        tokens_before = (config.capacity or 0) + max(0, config.every - _SINGLE_TOKENS)
        sizes = [_ROOM_TOKENS, *[1] * _SINGLE_TOKENS]
        return self._refusal(lambda: self._differs(PLAIN_WALK, TOKEN_BY_TOKEN, sizes, tokens_before))

    def trial_of_selection(self, seed: int) -> str:
        """Return the reason that blocks can't be read under masks; empty if they can. Both sides are plain PyTorch."""
        methods, sizes = (PLAIN_WALK, TOKEN_BY_TOKEN), [_ROOM_TOKENS, *[1] * _SINGLE_TOKENS]
        tokens_before = max(0, min(_SELECTED_FROM_TOKENS, self._model.longest - sum(sizes)))
        return self._refusal(lambda: self._attempt(methods, sizes, tokens_before, 1, seed)[0])

    def trial_of_codes(self, method: Method) -> Trial:
        """Compare a block and single tokens of a coded cache with the plain walk's."""
        config, before = self._config, Counter(RAN)
        sizes = [_CODED_BLOCK_TOKENS, *[1] * _SINGLE_TOKENS]
        tokens_before = max(0, config.capacity + config.every - _CODED_BLOCK_TOKENS + 4) if config.capacity else _DENSE_TOKENS
        refused = self._refusal(lambda: self._differs(method, PLAIN_WALK, sizes, tokens_before))
        return Trial(refused, ran=RAN - before)

    def trial_of_prompt(self) -> str:
        """Return the reason that a prompt to be cut can't be read at once; empty if it can. A short prompt is tried."""
        return self._refusal(self._short_prompts_differ)

    def _short_prompts_differ(self) -> str:
        """Compare on a prompt that is cut to a small capacity, or to the cell's capacity if the policy needs more."""
        capacity = self._config.capacity
        try:
            return self._prompts_differ(None if capacity is None else min(capacity, _PROMPT_CAPACITY))
        except ValueError:
            return self._prompts_differ(capacity)

    def _prompts_differ(self, capacity: int | None) -> str:
        """Describe how one-pass and token-by-token reading of a prompt cut to this capacity differ; empty if they agree."""
        short = MethodCheck(self._model, replace(self._config, capacity=capacity), 1)
        sizes = [(capacity or 0) + _PROMPT_TOKENS, *[1] * (_SINGLE_TOKENS if self._exact else 0)]
        try:
            return short._differs(PLAIN_WALK, TOKEN_BY_TOKEN, sizes, 0)
        finally:
            self.max_error = max(self.max_error, short.max_error)

    def _refusal(self, compare: Callable[[], str]) -> str:
        """Return the result of a comparison, or the error that it raises."""
        try:
            return compare()
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> str:
        self.max_error = torch.inf
        return f"{type(error).__name__}: {first_line(error)}"

    def _decoder(self, method: Method) -> CachedDecoder:
        """Create a decoder with a cache that is almost full. It captures its second step."""
        read = CachedDecoder(self._model, self._config, self._streams, method)
        if read.graphs is not None:
            read.graphs = read.graphs.fresh(after=1)
        if self._filled:
            read.fill_randomly(self._filled)
        return read

    def _sizes(self, fast: CachedDecoder) -> list[int]:
        """Return the sizes of the blocks to compare: a block that fills the cache, single tokens, and a block that evicts."""
        closed = "closed form" in fast.offers
        if self._timed and self._config.capacity is not None:
            odd = [_TIMED_BLOCK_TOKENS] * ("FlexAttention" in fast.offers)  # FlexAttention can't compute it
            first = [self._timed_tokens(fast)] * (1 + (self._exact or closed)) + odd
            return [*first, *self._single_sizes(fast, self._filled + sum(first))]
        first = [(self._config.capacity or self._filled) - self._filled + _EVICTING_TOKENS]
        last = [_CLOSED_BLOCK_TOKENS] if closed else [_BLOCK_TOKENS if self._exact else _BLOCK_TOKENS_16_BITS]
        is_fast = closed or not fast.offers.isdisjoint(("compiled walk", "compiled steps"))
        return [*first, *self._single_sizes(fast, self._filled + sum(first)), *(last if is_fast else [])]

    def _timed_tokens(self, fast: CachedDecoder) -> int:
        """Return the size of a block that every offered shortcut can read: FlexAttention reads whole tiles."""
        return TILE if "FlexAttention" in fast.offers else _TIMED_BLOCK_TOKENS

    def _single_sizes(self, fast: CachedDecoder, tokens_before: int) -> list[int]:
        """Return the sizes of single tokens after `tokens_before` tokens, and of blocks in between if evictions are far apart.

        Steps with and without an eviction come three times each: for a dry run, a capture and a replay.
        """
        cadence = fast.walks[0].slots.cadence
        if cadence.every <= _SHORT_CYCLE:
            return [1] * max(_SINGLE_TOKENS, 3 * cadence.every)
        sizes = list[int]()
        for _ in range(3):
            gap = next(n for n in range(cadence.origin + cadence.every) if cadence.evicts(tokens_before + n + 2))
            sizes += [*[gap] * (gap > 0), *[1] * _SHORT_CYCLE]
            tokens_before += gap + _SHORT_CYCLE
        return sizes

    def _differs(self, method: Method, reference: Method, sizes: Sequence[int], tokens_before: int, streams: int = 1) -> str:
        """Describe how a method's attention or kept tokens differ from a reference method's; empty if they agree.

        Rounding may make a head evict another token, or swap two evictions, but hardly ever in the same head on other tokens. In
        more than 16 bits, such a comparison is therefore repeated with other tokens, up to `_ATTEMPTS` times.
        """
        uncertain: frozenset[Row] | None = None
        for seed in range(_ATTEMPTS):
            refused, verdict = self._attempt((method, reference), sizes, tokens_before, streams, seed)
            if refused and self._exact and verdict.rounding_error > _MOST_ROUNDING and seed < _ATTEMPTS - 1:
                continue
            if refused:
                return refused
            rows = verdict.diverged | verdict.swapped.keys()
            uncertain = rows if uncertain is None else uncertain & rows
            if not uncertain or not self._exact:
                return ""
        if uncertain and uncertain <= verdict.swapped.keys():
            self.max_error = max(self.max_error, *(verdict.swapped[row] for row in uncertain))
            return _ATTENTION_DIFFERS
        return "a head holds other tokens than the plain walk's, whatever is read"

    def _attempt(
        self, methods: tuple[Method, Method], sizes: Sequence[int], tokens_before: int, streams: int, seed: int
    ) -> tuple[str, Verdict]:
        """Compare a method with a reference once. The rounding error of the reference is measured where errors exceed it."""
        verdict = self._verdict(methods, sizes, tokens_before, streams, seed)
        if verdict.max_error > 1 and (wider := self._wider_dtype()) is not None:
            first = verdict.max_error  # against the rounded reference; both together may be off by three times its error
            verdict = self._verdict(methods, sizes, tokens_before, streams, seed, wider)
            first /= max(1.0, 3 * verdict.rounding_error)
            verdict = verdict._replace(max_error=max(verdict.max_error, first))
        self.max_error = max(self.max_error, verdict.max_error)
        allowed = _OTHER_VICTIMS if self._exact else _OTHER_VICTIMS_16_BITS
        if verdict.rounding_error > _MOST_ROUNDING:
            return f"rounding changes attention by {verdict.rounding_error:.1f} times what is allowed", verdict
        if verdict.max_error > 1:
            return _ATTENTION_DIFFERS, verdict
        if verdict.other_victims > allowed:
            return f"{verdict.other_victims:.0%} of the tokens it evicts are others than the plain walk's", verdict
        return "no head of a layer could be compared with the plain walk's" if verdict.uncompared else "", verdict

    def _verdict(
        self,
        methods: tuple[Method, Method],
        sizes: Sequence[int],
        tokens_before: int,
        streams: int,
        seed: int,
        wider: torch.dtype | None = None,
    ) -> Verdict:
        """Replay the same inputs by a method and a reference.

        wider: dtype in which the reference is also computed, to measure its rounding error; None if it counts as exact.
        """
        model = self._model
        tokens = random_tokens(model.hf, streams, sum(sizes), seed)
        candidate, reference = (CachedDecoder(model, self._config, streams, method) for method in methods)
        reads = {reference: model.dtype, candidate: model.dtype}
        if wider is not None and not any(walk.notes_written for walk in reference.walks):
            reads[CachedDecoder(model, self._config, streams, methods[1], wider)] = wider
        for read in reads:
            if tokens_before:
                read.fill_randomly(tokens_before, seed)
            read.reserve(sum(sizes))
        comparison = ReferenceComparison(self._inputs(tokens), reads, tokens_before)
        for block in tokens.split(list(sizes), 1):
            if self._config.evict == "prompt" and not candidate.walks:
                comparison.read_prompt(block, _PROMPT_BLOCK)
            else:
                comparison.read(block)
        return comparison.verdict()

    def _inputs(self, tokens: Tensor) -> list[LayerInputs]:
        """Return the inputs of all layers' attention on these tokens, which are recorded once."""
        for recorded, inputs in self._recorded:
            if recorded.shape == tokens.shape and torch.equal(recorded, tokens):
                return inputs
        self._recorded.append((tokens, record_inputs(self._model, tokens)))
        return self._recorded[-1][1]

    def _wider_dtype(self) -> torch.dtype | None:
        """Return the dtype in which rounding errors are measured; None if there is none. Another dtype would change codes."""
        if self._model.dtype == torch.float64 or self._config.kv is not None:
            return None
        return torch.float64 if self._exact else torch.float32

    def _differs_captured(self, fast: CachedDecoder, reference: CachedDecoder, method: Method, sizes: Sequence[int]) -> str:
        """Describe how captured steps differ from eager ones; empty if they agree, or if none is captured.

        Fused steps round differently in every layer. Their logits may differ by twice the difference between kernels and plain
        walk, which agree in every layer.
        """
        if fast.graphs is None:
            self._differences([reference, fast], sizes)  # both are timed in the state after these tokens
            return ""
        eager = self._decoder(replace(method, captured=False, fused=False))
        rounding_error, error = self._differences([eager, reference, fast], sizes)
        if method.fused and rounding_error > _MOST_ROUNDING:
            return f"rounding changes logits by {rounding_error:.1f} times what is allowed"
        error /= max(1.0, 2 * rounding_error) if method.fused else 1.0
        self.max_error = max(self.max_error, error)
        return "its logits differ from those of steps that are not captured" if error > 1 else ""

    def _differences(self, reads: Sequence[CachedDecoder], sizes: Sequence[int]) -> list[float]:
        """Return the largest difference of each decoder's logits from the first decoder's, relative to the tolerance."""
        model, max_errors = self._model, [0.0] * (len(reads) - 1)
        for block in random_tokens(model.hf, reads[0].streams, sum(sizes), seed=1).split(list(sizes), 1):
            keep = None
            if block.shape[1] > 1:
                keep = torch.arange(max(0, block.shape[1] - _BLOCK_TOKENS), block.shape[1], device=model.device)
            expected, *logits = (read(block, keep=keep).float() for read in reads)
            errors = [relative_difference(x, expected) / rounding_of(model.dtype) for x in logits]
            max_errors = [max(pair) for pair in zip(max_errors, errors, strict=True)]
        return max_errors

    def _slower(self, what: str, tokens: int, fast: CachedDecoder, reference: CachedDecoder) -> str:
        """Return a message if a block or a step takes longer than a plain one; otherwise empty. Timings are interleaved."""
        block = torch.zeros(self._streams, tokens, dtype=torch.int64, device=self._model.device)
        keep = None if tokens == 1 else torch.full((1,), tokens - 1, device=self._model.device)
        seconds: list[list[float]] = [[], []]
        for _ in range(_SINGLE_TOKENS if tokens == 1 else _TIMED_BLOCKS):
            for read, of_decoder in zip((fast, reference), seconds, strict=True):
                of_decoder.append(seconds_of(partial(read, block, keep=keep), self._model.device))
            if tokens > 1 and seconds[0][0] * _CLEARLY < seconds[1][0]:
                break
        ours, theirs = (1e3 * median(of_decoder) for of_decoder in seconds)
        return f"a {what} takes {ours:.3g} ms, and {theirs:.3g} ms plainly" if ours > theirs else ""


def blocks_by(read: CachedDecoder) -> str:
    """Return the method by which a decoder reads blocks, as in `FastCheck.blocks`."""
    if not read.config.policy.evicts:
        return "masks" if isinstance(read.config.policy, Selecting) else "closed form"
    return next((name for name in BLOCK_METHODS if name in read.offers), "walk")
