"""The check that guards every shortcut: the same tokens are read by the plain walk too, past the first evictions."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST, PLAIN_WALK, Method
from kvbench.harness.engine.model import Model

_EVICTING_TOKENS = 256  # read after the cache is full
_EVICTING_TOKENS_16_BITS = 32
_BLOCK_TOKENS = 128
_SINGLE_TOKENS = 8  # read one by one at the end
_DENSE_TOKENS = 64  # read before that, where there is no capacity to fill
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest logit
_ROUNDING_16_BITS = 4e-2


class FastCheck(NamedTuple):
    """How a cell is read.

    Attributes:
        method: the shortcuts that agree with the plain walk.
        blocks: what they come to for blocks: "closed form", "compiled walk" or "walk".
        step: and for single tokens: "captured" (a CUDA graph), "compiled" (kernels) or "plain".
        differs: largest difference from the plain walk's logits, in units of rounding.
        refused: why a faster method was not used that should have been; empty if none was.
        plain_because: why blocks have nothing faster than the plain walk; empty if they have.
    """

    method: Method
    blocks: str
    step: str
    differs: float
    refused: str = ""
    plain_because: str = ""


def fast_method(model: Model, config: CacheConfig) -> FastCheck:
    """The fastest way of reading that agrees with the plain walk.

    Both read random tokens: enough to fill the cache, 256 more in blocks, and 8 one by one. The last logits of each block are
    compared. In 16 bits, a policy that looks at attention may evict another token because of rounding, after which the caches
    differ; there only 32 tokens are read after the cache is full (256 if there is a closed form, which looks at no attention).

    Args:
        model: of the cell.
        config: of the cell; a policy that keeps a cache.
    """
    fast, plain = CachedDecoder(model, config, method=FASTEST), CachedDecoder(model, config, method=PLAIN_WALK)
    closed, compiled = any(w.has_closed_form for w in fast.walks), any(w.is_compiled for w in fast.walks)
    by_kernel = any(w.steps_by_kernel for w in fast.walks)
    blocks = "closed form" if closed or not config.policy.evicts else "compiled walk" if compiled else "walk"
    lost = next((w.lost for w in fast.walks if w.lost), "")
    because = next((w.plain_because for w in fast.walks if w.plain_because), "")
    if not (closed or compiled or by_kernel):
        return FastCheck(PLAIN_WALK, blocks, "plain", 0.0, lost, because)
    evicting = _EVICTING_TOKENS if closed or model.dtype in _ROUNDING else _EVICTING_TOKENS_16_BITS
    try:
        worst = _difference(model, config.capacity or _DENSE_TOKENS, evicting, fast, plain)
    except Exception as error:  # a kernel or a graph may ask for what the device can't do
        worst, refused = torch.inf, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    else:
        refused = "" if worst <= 1 else "its logits differ from the plain walk's"
    if refused:
        return FastCheck(PLAIN_WALK, "walk" if config.policy.evicts else blocks, "plain", worst, refused, because)
    plain_steps = replace(FASTEST, step_kernel=False, captured=False)
    if fast.graphs is None:  # on a CPU a step by kernels is always the faster one (docs/performance.md)
        method, step = (FASTEST, "compiled") if by_kernel else (plain_steps, "plain")
        return FastCheck(method, blocks, step, worst, lost, because)
    fast_seconds, plain_seconds = _step_seconds(model, fast, plain)
    if fast_seconds > plain_seconds:
        slower = f"a step takes {1e3 * fast_seconds:.3g} ms, and {1e3 * plain_seconds:.3g} ms plainly"
        return FastCheck(plain_steps, blocks, "plain", worst, slower, because)
    step = "captured" if fast.graphs.replayed else "compiled"
    return FastCheck(FASTEST, blocks, step, worst, fast.graphs.refused or lost, because)


def _step_seconds(model: Model, *decoders: CachedDecoder) -> tuple[float, ...]:
    """Median seconds of a step, for each decoder; they take turns."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    seconds: list[list[float]] = [[] for _ in decoders]
    for _ in range(_SINGLE_TOKENS):
        for read, of_decoder in zip(decoders, seconds, strict=True):
            _wait(model.device)
            start = time.perf_counter()
            read(token)
            _wait(model.device)
            of_decoder.append(time.perf_counter() - start)
    return tuple(median(of_decoder) for of_decoder in seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _difference(model: Model, fill: int, evicting: int, fast: CachedDecoder, plain: CachedDecoder) -> float:
    """Largest difference between two decoders' logits, in units of rounding."""
    vocabulary = model.hf.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, fill + evicting + _SINGLE_TOKENS), generator=torch.Generator().manual_seed(1)).to(
        model.device
    )
    worst = 0.0
    for block in tokens.split([fill, *_block_sizes(evicting), *[1] * _SINGLE_TOKENS], 1):
        keep = None
        if block.shape[1] > 1:
            keep = torch.arange(max(0, block.shape[1] - _BLOCK_TOKENS), block.shape[1], device=model.device)
        logits, expected = (read(block, keep=keep).float() for read in (fast, plain))
        rounding = _ROUNDING.get(model.dtype, _ROUNDING_16_BITS) * expected.abs().amax().clamp(min=1)
        worst = max(worst, float(((logits - expected).abs().amax() / rounding).nan_to_num(torch.inf)))
    return worst


def _block_sizes(tokens: int) -> list[int]:
    """Whole blocks, and a shorter one for the remainder."""
    whole, remainder = divmod(tokens, _BLOCK_TOKENS)
    return [_BLOCK_TOKENS] * whole + [remainder] * (remainder > 0)
