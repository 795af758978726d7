"""The check that guards every shortcut: the same tokens are read by the plain walk too, past the first evictions.

Shortcuts for blocks and for single tokens are judged apart, so that a fault in one leaves the other in use. Where a kernel may be
slower than plain PyTorch, both are timed, and the faster one is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from kvbench.harness.core.device import free_bytes, wait_for
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST, PLAIN_WALK, Method
from kvbench.harness.engine.model import Model
from kvbench.policies.dense import Dense

_EVICTING_TOKENS = 256  # read after the cache is full
_EVICTING_TOKENS_16_BITS = 32
_BLOCK_TOKENS = 128
_SINGLE_TOKENS = 8  # read one by one at the end
_DENSE_TOKENS = 64  # read before that, where there is no capacity to fill
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest logit
_ROUNDING_16_BITS = 4e-2

_TIMED_DEVICES = {"cuda"}  # on a CPU a kernel is always the faster one (docs/performance.md)
_TIMED_BLOCK_TOKENS = 64
_TIMED_BLOCKS = 3
_ROOM_TOKENS = 32  # that a cache filled with random numbers lacks when the first block comes
_CACHES_PER_FREE_MEMORY = 4  # two caches are compared, and take no more than half of it


class FastCheck(NamedTuple):
    """How a cell is read.

    Attributes:
        method: the shortcuts that agree with the plain walk.
        blocks: what they come to for blocks: "closed form", "compiled walk", "walk"; "full attention" where prompts are cut once.
        step: and for single tokens: "fused" (a CUDA graph of compiled code), "captured" (a CUDA graph), "compiled" (kernels) or
            "plain".
        differs: largest difference from the plain walk's logits, in units of rounding, of all methods tried.
        refused: why faster methods were not used that should have been, joined by "; "; empty if none was.
        plain_because: why blocks have nothing faster than the plain walk; empty if they have.
    """

    method: Method
    blocks: str
    step: str
    differs: float
    refused: str = ""
    plain_because: str = ""


class _Trial(NamedTuple):
    """What came of one method beside the plain walk.

    Attributes:
        refused: why it can't be used: an error, or other logits; empty if it can.
        slow_blocks: that its blocks take longer than plain ones; empty if they don't, or were not timed.
        slow_steps: the same of its single tokens.
        captured: its steps were replayed.
        eager_because: why steps were not captured, though they should have been; empty otherwise.
    """

    refused: str = ""
    slow_blocks: str = ""
    slow_steps: str = ""
    captured: bool = False
    eager_because: str = ""


def fast_method(model: Model, config: CacheConfig, streams: int = 1, fused: bool = False) -> FastCheck:
    """The fastest way of reading that agrees with the plain walk.

    Both read random tokens: enough to fill the cache, 256 more in blocks, and 8 one by one. The last logits of each block are
    compared. In 16 bits, a policy that looks at attention may evict another token because of rounding, after which the caches
    differ; there only 32 tokens are read after the cache is full (256 if there is a closed form, which looks at no attention).
    On CUDA, where a token of the plain walk is slow, both caches are filled with the same random K and V, and only the last 32
    slots and up to 96 tokens more are read.

    Args:
        model: of the cell.
        config: of the cell; a policy that keeps a cache.
        streams: of the cell, for times on CUDA; elsewhere one stream is read.
        fused: also try captured steps whose code is compiled as a whole, which takes up to a minute.
    """
    if config.evict == "prompt":
        return _of_prompt(model, config, streams, fused)
    fast = CachedDecoder(model, config, method=FASTEST)
    blocks, by_kernel = _blocks_by(fast), any(w.steps_by_kernel for w in fast.walks)
    lost = next((w.lost for w in fast.walks if w.lost), "")
    because = next((w.plain_because for w in fast.walks if w.plain_because), "")
    is_fast = by_kernel or fast.graphs is not None or any(w.has_closed_form or w.is_compiled for w in fast.walks)
    fastest = replace(FASTEST, fused=fused and fast.graphs is not None)
    step_ladder = _step_ladder(by_kernel, fast.graphs is not None, fastest.fused)
    del fast
    if not is_fast:
        return FastCheck(PLAIN_WALK, blocks, "plain", 0.0, lost, because)
    check = _Check(model, config, streams)
    whole = check.trial(fastest)
    block_method, block_reasons = fastest, list[str]()
    if config.policy.evicts and (whole.refused or whole.slow_blocks):
        block_method, _, block_reasons = check.choose(_block_ladder(model, config), whole, lambda t: t.slow_blocks)
        blocks = _blocks_by(CachedDecoder(model, config, method=block_method))
    step_method, steps, step_reasons = check.choose(step_ladder, whole, lambda t: t.slow_steps)
    if whole.refused and not block_reasons and not step_reasons:  # they fail only together
        plainly = "walk" if config.policy.evicts else blocks
        return FastCheck(PLAIN_WALK, plainly, "plain", check.worst, whole.refused, because)
    is_fused = steps.captured and step_method.fused
    method = replace(block_method, step_kernel=step_method.step_kernel, captured=step_method.captured, fused=is_fused)
    step = "fused" if is_fused else "captured" if steps.captured else "compiled" if method.step_kernel else "plain"
    reasons = dict.fromkeys([*block_reasons, *step_reasons, steps.eager_because or lost])
    return FastCheck(method, blocks, step, check.worst, "; ".join(filter(None, reasons)), because)


def _of_prompt(model: Model, config: CacheConfig, streams: int, fused: bool) -> FastCheck:
    """The fastest way where prompts are cut once: they are read under full attention, and what follows in a cache that grows."""
    growing = CacheConfig(Dense(), None, config.positions, config.limit, config.seed)
    found = fast_method(model, growing, streams, fused)
    return found._replace(method=replace(found.method, walk_kernel=False), blocks="full attention")


def _blocks_by(read: CachedDecoder) -> str:
    """How a decoder reads blocks, as in `FastCheck`. Where layers share K and V, a token passes all layers before the next."""
    if read.config.policy.evicts and any(w.slots.shape.readers > 1 and not w.has_closed_form for w in read.walks):
        return "walk"
    if any(w.has_closed_form for w in read.walks) or not read.config.policy.evicts:
        return "closed form"
    return "compiled walk" if any(w.is_compiled for w in read.walks) else "walk"


def _block_ladder(model: Model, config: CacheConfig) -> list[tuple[str, Method]]:
    """Methods that are fast for blocks alone, the best first."""
    ladder = [("closed form", Method(walk_kernel=True)), ("compiled walk", Method(closed_form=False, walk_kernel=True))]
    return [(name, method) for name, method in ladder if _blocks_by(CachedDecoder(model, config, method=method)) == name]


def _step_ladder(by_kernel: bool, captured: bool, fused: bool) -> list[tuple[str, Method]]:
    """Methods that are fast for single tokens alone, the best first."""
    ladder = [
        ("captured kernels", replace(PLAIN_WALK, step_kernel=True, captured=True)),
        ("step kernels", replace(PLAIN_WALK, step_kernel=True)),
        ("captured steps", replace(PLAIN_WALK, captured=True)),
    ]
    if not captured:  # on a CPU the flag means nothing
        return [("step kernels", ladder[0][1])] if by_kernel else []
    usable = [rung for rung in ladder if by_kernel or not rung[1].step_kernel]
    return [("fused steps", replace(usable[0][1], fused=True)), *usable] if fused else usable


class _Check:
    """Tries methods on one cell.

    Attributes:
        worst: largest difference found so far, in units of rounding.
    """

    def __init__(self, model: Model, config: CacheConfig, streams: int) -> None:
        self._model, self._config = model, config
        self._timed = model.device.type in _TIMED_DEVICES
        self._streams = 1
        if self._timed:
            fitting = free_bytes(model.device) // (_CACHES_PER_FREE_MEMORY * model.kv_bytes(config.capacity or _DENSE_TOKENS))
            self._streams = max(1, min(streams, fitting))
        self.worst = 0.0

    def choose(
        self, ladder: Sequence[tuple[str, Method]], whole: _Trial, slow: Callable[[_Trial], str]
    ) -> tuple[Method, _Trial, list[str]]:
        """The first method that agrees with the plain walk and is not slower; else the plain walk.

        Args:
            ladder: methods with their names. If the trial of the fastest did not fail, it stands for the first of them.
            whole: the trial of the fastest method.
            slow: why a trial's blocks, or steps, are too slow.

        Returns:
            The method, its trial, and why better ones were not chosen.
        """
        reasons = list[str]()
        for rung, (name, method) in enumerate(ladder):
            trial = whole if rung == 0 and not whole.refused else self.trial(method)
            if not trial.refused and not slow(trial):
                return method, trial, reasons
            reasons.append(f"{name}: {trial.refused}" if trial.refused else slow(trial))
        return PLAIN_WALK, _Trial(), reasons

    def trial(self, method: Method) -> _Trial:
        """Compare a method with the plain walk, and time both where a kernel may be slower."""
        try:
            fast, plain = self._decoder(method), self._decoder(PLAIN_WALK)
            differs = _difference(self._model, self._block_sizes(fast), fast, plain)
            self.worst = max(self.worst, differs)
            if differs > 1:
                return _Trial("its logits differ from the plain walk's")
            if not self._timed:
                return _Trial()
            blocks = "" if _blocks_by(fast) == _blocks_by(plain) else self._slower("block", _TIMED_BLOCK_TOKENS, fast, plain)
            steps = self._slower("step", 1, fast, plain)
        except Exception as error:  # a kernel or a graph may ask for what the device can't do
            self.worst = torch.inf
            return _Trial(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
        graphs = fast.graphs
        return _Trial("", blocks, steps, graphs is not None and graphs.replayed > 0, graphs.refused if graphs else "")

    def _decoder(self, method: Method) -> CachedDecoder:
        """A decoder that captures its second step; its cache is filled where reading is slow."""
        read = CachedDecoder(self._model, self._config, self._streams, method)
        if read.graphs is not None:
            read.graphs = read.graphs.fresh(after=1)
        if self._timed and self._config.capacity is not None:
            read.fill_randomly(max(0, self._config.capacity - _ROOM_TOKENS))
        return read

    def _block_sizes(self, fast: CachedDecoder) -> list[int]:
        """Tokens of the blocks that are compared."""
        exact = self._model.dtype in _ROUNDING or any(w.has_closed_form for w in fast.walks)
        if self._timed and self._config.capacity is not None:
            return [_TIMED_BLOCK_TOKENS] * (1 + exact)
        whole, remainder = divmod(_EVICTING_TOKENS if exact else _EVICTING_TOKENS_16_BITS, _BLOCK_TOKENS)
        return [self._config.capacity or _DENSE_TOKENS, *[_BLOCK_TOKENS] * whole, *[remainder] * (remainder > 0)]

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
        ours, plainly = (1e3 * median(of_decoder) for of_decoder in seconds)
        return f"a {what} takes {ours:.3g} ms, and {plainly:.3g} ms plainly" if ours > plainly else ""


def _difference(model: Model, sizes: Sequence[int], fast: CachedDecoder, plain: CachedDecoder) -> float:
    """Largest difference between two decoders' logits, in units of rounding. sizes: tokens of each block before single ones."""
    sizes, streams = [*sizes, *[1] * _SINGLE_TOKENS], fast.streams
    vocabulary = model.hf.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (streams, sum(sizes)), generator=torch.Generator().manual_seed(1))
    worst = 0.0
    for block in tokens.to(model.device).split(sizes, 1):
        keep = None
        if block.shape[1] > 1:
            keep = torch.arange(max(0, block.shape[1] - _BLOCK_TOKENS), block.shape[1], device=model.device)
        logits, expected = (read(block, keep=keep).float() for read in (fast, plain))
        rounding = _ROUNDING.get(model.dtype, _ROUNDING_16_BITS) * expected.abs().amax().clamp(min=1)
        worst = max(worst, float(((logits - expected).abs().amax() / rounding).nan_to_num(torch.inf)))
    return worst
