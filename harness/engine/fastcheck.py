"""Check every shortcut against the plain walk on the same tokens, past the first evictions.

Shortcuts for blocks and shortcuts for single tokens are checked separately, so that a fault in one kind leaves the other in use.
A shortcut that did not run during the comparison is not used. If a kernel may be slower than plain PyTorch, both are timed, and
the faster method is used. Attention of a whole block without eviction is checked when a model is loaded: `selfcheck` compares it
with the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from kvbench.harness.core.codec import Codec
from kvbench.harness.core.parameters import parameters_of
from kvbench.harness.engine import trial
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST, PLAIN_WALK, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.trial import BLOCK_METHODS, MethodCheck, Trial, blocks_by
from kvbench.policies import Policy, Selecting
from kvbench.policies.dense import Dense

_SELECTION_ATTEMPTS = 2  # comparisons of masks with gathered tokens, each on new tokens
_READ_TOKENS = 600  # upper bound of the tokens that the check reads in addition to those that fill a cache


class FastCheck(NamedTuple):
    """Execution method chosen for a cell.

    Attributes:
        method: the shortcuts that agree with the plain walk.
        blocks: "closed form", "compiled walk", "compiled steps", "masks" or "walk"; "full attention" if prompts are
            cut once.
        step: method for single tokens: "fused" (a CUDA graph of compiled code), "captured" (a CUDA graph), "compiled" (kernels)
            or "plain".
        differs: largest measured error of attention, relative to the tolerance.
        refused: reasons that expected faster methods are not used, joined by "; "; empty if there are none.
        plain_because: reason that no fast path exists for blocks; empty if one exists.
    """

    method: Method
    blocks: str
    step: str
    differs: float
    refused: str = ""
    plain_because: str = ""


class Rung(NamedTuple):
    """Candidate method.

    Attributes:
        name: name of the candidate in messages.
        method: method with this shortcut, and without shortcuts of the other kind (for blocks, or for steps).
        shortcut: name, as in `RAN`, of the shortcut that must run.
    """

    name: str
    method: Method
    shortcut: str


def fast_method(model: Model, config: CacheConfig, streams: int = 1, fused: bool = False) -> FastCheck:
    """Return the fastest method that agrees with the plain walk.

    The queries, keys and values of random tokens are recorded in one forward pass, and replayed by the method and by the plain
    walk, whose caches were filled with the same random K and V. The check compares the attention of each head in every layer,
    and the tokens kept. It reads a block in which the cache becomes full, single tokens, and a block in which every token evicts
    one. Captured steps are compared with eager steps, by their logits.

    Args:
        config: configuration of the cell, with a policy that keeps a cache.
        streams: number of streams of the cell, for timing on CUDA. Other devices read one stream.
        fused: also try captured steps whose code is compiled as a whole, which takes up to a minute.
    """
    if config.kv is not None:
        return _of_coded(model, config, config.kv)
    if isinstance(config.policy, Selecting):
        return _of_selection(model, config)
    if config.evict == "prompt":
        return _of_prompt(model, config, streams, fused)
    if config.policy.evicts and (config.capacity or 0) + _READ_TOKENS > model.longest:
        return FastCheck(PLAIN_WALK, "walk", "plain", 0.0, plain_because="the model has fewer positions than the check reads")
    check = MethodCheck(model, config, streams)
    unfit = check.trial_of_runs() if config.every > 1 else ""
    if unfit:
        return FastCheck(TOKEN_BY_TOKEN, "walk", "plain", check.max_error, f"runs: {unfit}")
    fast = CachedDecoder(model, config, method=FASTEST)
    blocks, by_kernel = blocks_by(fast), "step kernel" in fast.offers
    lost = next((w.lost for w in fast.walks if w.lost), "")
    because = next((w.plain_because for w in fast.walks if w.plain_because), "")
    is_fast = by_kernel or fast.graphs is not None or not fast.offers.isdisjoint(BLOCK_METHODS)
    fastest = replace(FASTEST, fused=fused and fast.graphs is not None)
    step_ladder = _step_ladder(by_kernel, fast.graphs is not None, fastest.fused)
    block_ladder = _block_ladder(model, config, fast) if config.policy.evicts else []
    del fast
    if not is_fast:
        return FastCheck(PLAIN_WALK, blocks, "plain", check.max_error, lost, because)
    whole = check.trial(fastest)
    block_method, _, block_reasons = _choose(check, block_ladder, whole, lambda tried: tried.slow_blocks)
    step_method, steps, step_reasons = _choose(check, step_ladder, whole, lambda tried: tried.slow_steps)
    if config.policy.evicts:
        blocks = blocks_by(CachedDecoder(model, config, method=block_method))
    if whole.refused and not block_reasons and not step_reasons:  # the candidates fail only in combination
        return FastCheck(PLAIN_WALK, "walk" if config.policy.evicts else blocks, "plain", check.max_error, whole.refused, because)
    used = step_method.step_kernel, step_method.captured, step_method.fused
    method = replace(block_method, step_kernel=used[0], captured=used[1], fused=used[2])
    step = "fused" if method.fused else "captured" if method.captured else "compiled" if method.step_kernel else "plain"
    reasons = dict.fromkeys([*block_reasons, *step_reasons, steps.eager_because or lost])
    return FastCheck(method, blocks, step, check.max_error, "; ".join(filter(None, reasons)), because)


def remembered_check(model: Model, config: CacheConfig, streams: int = 1, fused: bool = False) -> FastCheck:
    """Return the cached result of `fast_method`. Cells that differ only in their seed or text share a result."""
    known = _CHECKS.setdefault(model.hf, {})
    at_once = streams if model.device.type in trial.TIMED_DEVICES else 1
    cache = (parameters_of(config.policy), config.capacity, config.positions, config.limit, config.evict, config.kv)
    key = type(config.policy), repr((cache, model.dtype, model.device, at_once, fused))
    if key not in known:
        known[key] = fast_method(model, config, at_once, fused)
    return known[key]


_CHECKS: WeakKeyDictionary[PreTrainedModel, dict[tuple[type[Policy], str], FastCheck]] = WeakKeyDictionary()


def _of_coded(model: Model, config: CacheConfig, codec: Codec) -> FastCheck:
    """Return the method for a coded cache: runs, or a kernel for single tokens.

    A prompt is read and checked in floats. In codes, a rounding error could become an error of a whole code step.
    """
    once = config.evict == "prompt"
    check = MethodCheck(model, replace(config, kv=None) if once else config, 1)
    unfit, because = check.trial_of_prompt() if once else check.trial_of_runs(), f"K and V are stored as {codec.name}"
    method, refused = (TOKEN_BY_TOKEN, f"runs: {unfit}") if unfit else (PLAIN_WALK, "")
    blocks = "full attention" if once and not unfit else "walk"
    after = CacheConfig(Dense(), None, config.positions, config.limit, config.seed, kv=codec) if once else config
    by_kernel, steps = replace(method, step_kernel=True), MethodCheck(model, after, 1)
    walks = CachedDecoder(model, after, method=by_kernel).walks
    if not all("step kernel" in walk.offers for walk in walks):
        refused = refused or next((walk.lost for walk in walks if walk.lost), "")
        return FastCheck(method, blocks, "plain", check.max_error, refused, because)
    coded = steps.trial_of_codes(by_kernel)
    unfit = coded.refused or ("" if coded.ran.get("step kernel") else "it did not answer")
    differs = max(check.max_error, steps.max_error)
    if unfit:
        reasons = filter(None, [refused, f"step kernels: {unfit}"])
        return FastCheck(method, blocks, "plain", differs, "; ".join(reasons), because)
    if coded.ran.get("coded walk") and not once:
        blocks, because = "compiled walk", ""
    return FastCheck(by_kernel, blocks, "compiled", differs, refused, because)


def _of_prompt(model: Model, config: CacheConfig, streams: int, fused: bool) -> FastCheck:
    """Return the fastest method if prompts are cut once: full attention for a prompt, and a growing cache afterwards."""
    growing = CacheConfig(Dense(), None, config.positions, config.limit, config.seed)
    chosen, check = fast_method(model, growing, streams, fused), MethodCheck(model, config, streams)
    unfit = check.trial_of_prompt()
    differs = max(chosen.differs, check.max_error)
    if unfit:
        refused = "; ".join(filter(None, [chosen.refused, f"full attention: {unfit}"]))
        return chosen._replace(method=replace(chosen.method, fill=False), blocks="walk", differs=differs, refused=refused)
    return chosen._replace(blocks="full attention", differs=differs)


def _of_selection(model: Model, config: CacheConfig) -> FastCheck:
    """Return the method of a policy that selects: masks for blocks, and gathered tokens for single tokens.

    Rounding may make a head select another page, but hardly ever on other tokens, too.
    """
    for seed in range(_SELECTION_ATTEMPTS):
        check = MethodCheck(model, replace(config, evict=1), 1)
        unfit = check.trial_of_selection(seed)
        if not unfit:
            return FastCheck(PLAIN_WALK, "masks", "plain", check.max_error)
    return FastCheck(TOKEN_BY_TOKEN, "walk", "plain", check.max_error, f"masks: {unfit}")


def _block_ladder(model: Model, config: CacheConfig, fast: CachedDecoder) -> list[Rung]:
    """Return the candidates for blocks, the best first. fast: decoder that may take every shortcut."""
    walked = CachedDecoder(model, config, method=Method(closed_form=False, walk_kernel=True, walk_graphs=True))
    in_graphs = "walk in graphs" in walked.offers
    by_kernel = Method(walk_kernel=True, walk_graphs=in_graphs)  # walks blocks that the closed form can't compute
    plainly, by_steps = Method(closed_form=False, walk_kernel=True), Method(closed_form=False, walk_steps=True)
    ladder = [
        Rung("FlexAttention", replace(by_kernel, flex=True), "FlexAttention"),
        Rung("closed form", by_kernel, "closed form"),
        Rung("walk in graphs", replace(plainly, walk_graphs=True), "walk in graphs"),
        Rung("compiled walk", plainly, "compiled walk"),
        Rung("compiled steps", by_steps, "compiled steps"),
    ]
    offers = fast.offers - {"compiled walk", "walk in graphs"} | walked.offers & {"compiled walk", "walk in graphs"}
    return [rung for rung in ladder if rung.shortcut in offers]


def _step_ladder(by_kernel: bool, captured: bool, fused: bool) -> list[Rung]:
    """Return the candidates for single tokens, the best first."""
    kernels = Rung("step kernels", replace(PLAIN_WALK, step_kernel=True), "step kernel")
    if not captured:
        return [kernels] if by_kernel else []
    replayed = [
        Rung("captured kernels", replace(kernels.method, captured=True), "captured step"),
        kernels,
        Rung("captured steps", replace(PLAIN_WALK, captured=True), "captured step"),
    ]
    usable = [rung for rung in replayed if by_kernel or not rung.method.step_kernel]
    return [Rung("fused steps", replace(usable[0].method, fused=True), "captured step"), *usable] if fused else usable


def _choose(
    check: MethodCheck, ladder: Sequence[Rung], whole: Trial, slow: Callable[[Trial], str]
) -> tuple[Method, Trial, list[str]]:
    """Choose the first candidate that agrees with the plain walk, runs and is not slower; otherwise the plain walk.

    Args:
        check: runs the trials.
        whole: trial of all shortcuts at once. If it succeeded, it counts as the trial of the first candidate.
        slow: returns the message that a trial's blocks, or steps, are too slow.

    Returns:
        The method without shortcuts that did not run, its trial, and the reasons that better candidates were rejected.
    """
    reasons = list[str]()
    for index, rung in enumerate(ladder):
        tried = whole if index == 0 and not whole.refused else check.trial(rung.method)
        idle = "" if tried.ran.get(rung.shortcut) else tried.eager_because or "it did not answer in the check"
        if not (tried.refused or idle or slow(tried)):
            return rung.method.limited_to(tried.ran), tried, reasons
        reasons.append(f"{rung.name}: {tried.refused or idle}" if tried.refused or idle else slow(tried))
    return PLAIN_WALK, Trial(), reasons
