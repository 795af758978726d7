"""Checks of what a cache does in other calls than a prompt and single tokens: batches, turns, copies, another dtype."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from kvbench.harness.audit.attended import UNKNOWN
from kvbench.harness.audit.case import AuditedCache, check, refusable
from kvbench.harness.audit.subject import Reader
from kvbench.harness.audit.trace import Trace, Tracer, new_faults
from kvbench.harness.core.checks import NotApplicableError, Outcome, failed, judged, passed, require

_BLOCK, _CHUNK, _TURN, _LATER = 8, 24, 9, 12  # tokens
_PADDING = 5  # tokens
_OF_RUNS = ("determinism",)  # a failure may follow from these checks
_OF_PLACES = (*_OF_RUNS, "rows", "order", "length", "positions")
_OF_BLOCKS = (*_OF_PLACES, "mask")
_NO_PROMPT = "a press cuts what the first forward pass reads"


@check("Until a token is evicted, logits are those of full attention.", "K or V is changed although all tokens fit", _OF_PLACES)
def dense(case: AuditedCache) -> Outcome:
    """Compare logits with a forward pass without a cache, up to the first eviction."""
    require(case.is_exact, "values are stored rounded")
    count = case.decode.first_eviction or len(case.decode.logits)
    expected = case.hf(input_ids=case.text()[:, :count], use_cache=False).logits[0].float()
    return judged(case.differs(case.decode.logits[:count], expected, "full attention"), f"equal for {count} tokens")


@check("Until a token is evicted, blocks give the logits of single tokens.", "a block is cut too early", _OF_BLOCKS)
def blocks(case: AuditedCache) -> Outcome:
    """Read in blocks of 8."""
    require(case.subject.press is None, _NO_PROMPT)
    return judged(case.fault_of([_BLOCK] * (case.length // _BLOCK)), f"{case.length // _BLOCK} blocks of {_BLOCK}")


@check("A prompt may come in chunks.", "the cache takes every block of several tokens for a whole prompt", _OF_BLOCKS)
def chunked_prefill(case: AuditedCache) -> Outcome:
    """Read a prompt in chunks, past the budget, then single tokens."""
    require(case.subject.press is None, _NO_PROMPT)
    size = min(_CHUNK, max(1, (case.subject.budget or case.length) // 2))
    chunks = [size] * (case.past_full // size + 1)
    return judged(case.fault_of(case.steps(*chunks, then=_LATER)), f"{len(chunks)} chunks of {size}, {_LATER} tokens")


@check("Prompts of any length can be read.", "an index that assumes a prompt longer than the window", _OF_BLOCKS)
def short_prompts(case: AuditedCache) -> Outcome:
    """Read prompts of 1 and 2 tokens, of the budget, and beyond the budget, each followed by single tokens.

    A press reads a prompt of the usual length, and a prompt that is one token shorter.
    """
    size = case.subject.budget or _CHUNK
    lengths = sorted(
        {1, 2, size, size + 1, max(size, case.past_full)} if case.subject.press is None else {case.prompt - 1, case.prompt}
    )
    for count in lengths:
        if fault := case.fault_of(case.steps(count, then=max(_LATER, case.past_full - count))):
            return failed(f"prompt of {count}: {fault}")
    return passed(f"prompts of {', '.join(map(str, lengths))} tokens")


@check("A second turn goes on with the same cache.", "a second block of several tokens is taken for a new prompt", _OF_BLOCKS)
def second_turn(case: AuditedCache) -> Outcome:
    """Read single tokens past the budget, then a block of several tokens, then single tokens."""
    first = case.steps(case.prompt, then=max(1, case.past_full - case.prompt))
    return judged(case.fault_of(case.steps(*first, _TURN, then=_LATER)), f"{_TURN} tokens after {sum(first)}")


@check(
    "A left-padded text gives the logits of the text alone.",
    "padding is kept like a token. This is expected if first tokens are kept: read texts one by one, and use `--skip padding`",
    _OF_PLACES,
)
def padding(case: AuditedCache) -> Outcome:
    """Read two prompts side by side, the second left-padded, and compare each with the prompt alone."""
    require(case.is_exact, "values are stored rounded")
    count = max(_PADDING + 1, case.prompt)
    steps = case.steps(count, then=max(_LATER, case.past_full - count))
    texts = case.text(2)[:, : sum(steps)]
    valid = torch.ones_like(texts)
    valid[1, :_PADDING] = 0
    both = Reader(case.subject, case.hf, explicit=True)
    alone = [Reader(case.subject, case.hf, explicit=True) for _ in texts]
    for size in steps:
        first = both.tokens
        logits = both(texts[:, first : first + size], valid[:, : first + size])
        for row, reader in enumerate(alone):
            start = max(first, _PADDING if row else 0)
            expected = reader(texts[row : row + 1, start : first + size])[0, -1]
            if fault := case.differs(logits[row, -1], expected, "the text alone"):
                kind = f"left-padded by {_PADDING}" if row else "not padded"
                kept = f"; it keeps the first {case.sinks} tokens, here padding" if row and case.sinks else ""
                return failed(f"at step {first + size - 1}, {kind}: {fault}{kept}")
    return passed(f"equal at all {len(steps)} steps, padded by {_PADDING}")


@check("Beams can be reordered.", "a tensor of the cache is not reordered with the others", _OF_RUNS)
def beams(case: AuditedCache) -> Outcome:
    """Swap two texts by `reorder_cache`, as beam search does."""
    index: Any = torch.tensor([1, 0], device=case.hf.device)
    return _rearranged(case, "reorder_cache([1, 0])", lambda reader: reader.cache.reorder_cache(index), [0, 1], [1, 0])


@check("A text can be repeated.", "a tensor of the cache is not repeated with the others", _OF_RUNS)
def repeat(case: AuditedCache) -> Outcome:
    """Repeat a text by `batch_repeat_interleave`, to go on in several ways."""
    name = "batch_repeat_interleave(2)"
    return _rearranged(case, name, lambda reader: reader.cache.batch_repeat_interleave(2), [0], [0, 0])


def _rearranged(case: AuditedCache, name: str, change: Callable[[Reader], None], before: list[int], after: list[int]) -> Outcome:
    """Rearrange texts in the cache, and compare with a cache that read the texts in this order."""
    texts, count = case.text(2), case.past_full
    first, later = texts[:, :count], texts[after, count : count + _LATER]
    fault = _differs_after(case, name, change, first[before], first[after], later)
    return judged(fault, f"{name} after {count} tokens, then {_LATER} tokens")


@check("A copy is independent.", "the copy shares a tensor, or counts in a variable of the class", _OF_RUNS)
def deep_copy(case: AuditedCache) -> Outcome:
    """Continue a cache and its copy with different tokens, and compare both with new caches."""
    texts, readers = case.text(2), [Reader(case.subject, case.hf) for _ in range(3)]
    for reader in readers:
        _read(reader, texts[:1, : case.past_full])
    with refusable("deepcopy"):
        other = readers[0].fork()
    later = [texts[row : row + 1, case.past_full : case.past_full + _LATER] for row in (0, 1)]
    read = [_read(readers[0], later[0]), _read(other, later[1])]
    expected = [_read(readers[1], later[0]), _read(readers[2], later[1])]
    for name, a, b in zip(("the cache", "its copy"), read, expected, strict=True):
        if fault := case.differs(a, b, "a new cache"):
            return failed(f"{name}, after both went on: {fault}")
    return passed(f"a copy after {case.past_full} tokens, and {_LATER} other tokens")


@check("`reset` empties the cache.", "a counter, an index or a score survives `reset`", ("determinism", "length"))
def reset(case: AuditedCache) -> Outcome:
    """Read a text, reset, read another, and compare with a new cache."""
    texts, reader, expected = case.text(2)[:, : case.past_full], Reader(case.subject, case.hf), Reader(case.subject, case.hf)
    _read(reader, texts[:1])
    with refusable("reset"):
        reader.reset()
    if count := int(reader.cache.get_seq_length()):
        return failed(f"get_seq_length says {count} after reset")
    return judged(case.differs(_read(reader, texts[1:]), _read(expected, texts[1:]), "a new cache"), "equal to a new cache")


@check("`crop` removes the newest tokens.", "a counter, an index or a score is not cropped", _OF_PLACES)
def crop(case: AuditedCache) -> Outcome:
    """Crop before the first eviction, read other tokens, and compare with a new cache. Then crop after an eviction."""
    require(case.subject.press is None, _NO_PROMPT)
    require(getattr(case.subject.new_cache(case.hf), "is_croppable", True), "is_croppable is False")
    texts, full = case.text(2)[:, None], case.past_full
    count = min(_CHUNK, max(2, (case.subject.budget or _CHUNK) // 2))
    removed = min(_BLOCK, count // 2)
    evidence, first = f"crop(-{removed}) after {count} tokens", texts[0, :, :count]
    name = f"crop(-{removed})"
    if fault := _differs_after(case, name, lambda reader: reader.crop(removed), first, first[:, :-removed], texts[1, :, :_LATER]):
        return failed(f"{fault}, after {count} tokens")
    if (case.decode.first_eviction or full + 1) > full:
        return passed(f"{evidence}; none was evicted before")
    try:
        fault = _fault_of_crop(case, removed)
    except NotApplicableError as refusal:
        return passed(f"{evidence}; after {full}, with some evicted, {refusal}")
    return judged(fault and f"after {full} tokens, crop(-{removed}): {fault}", f"{evidence}, and after {full}, with some evicted")


def _fault_of_crop(case: AuditedCache, removed: int) -> str:
    """Return what goes wrong if the newest tokens are removed after an eviction; empty if nothing."""
    steps, of = case.steps(case.prompt, then=case.past_full - case.prompt), Trace()
    tracer, count = Tracer(Reader(case.subject, case.hf), case.hf, case.rotations, of), sum(steps)
    blocks = case.text()[:, : count + _LATER].split([*steps, *[1] * _LATER], 1)
    for block in blocks[: len(steps)]:
        tracer.read(block)
    with refusable(f"crop(-{removed})"):
        tracer.crop(removed)
    for block in blocks[len(steps) :]:
        tracer.read(block)
    before, after = of.passes[len(steps) - 1 : len(steps) + 1]
    for read, heads in zip(after.reads, case.decode.passes[len(steps)].held, strict=True):
        if stale := int((read.tokens == UNKNOWN).sum(1).max()):
            return f"layer {read.layer} still holds {stale} rows of removed tokens"
        for head, (held, earlier) in enumerate(zip(read.held(), heads, strict=True)):
            if lost := {token for token in earlier if token < count - removed} - {*held}:
                return f"layer {read.layer}, KV head {head} lost token {min(lost)}, which was held"
    if after.length != before.length - removed + 1:
        return f"get_seq_length said {before.length} before, and {after.length} after the next token"
    return new_faults(of, case.known)


@check("A model in bfloat16 can be read.", "a tensor is created in float32, or an index is computed in 16 bits")
def bfloat16(case: AuditedCache) -> Outcome:
    """Read with a copy of the model in bfloat16."""
    narrow: Any = deepcopy(case.hf)
    of = case.trace(case.shortened, hf=narrow.to(torch.bfloat16))
    if fault := new_faults(of, case.known):
        return failed(fault)
    last, before = of.passes[-1], case.decode.passes[len(of.passes) - 1]
    text = (
        f"{last.allocated:,} bytes after {last.end} tokens, {before.allocated:,} in {str(case.hf.dtype).removeprefix('torch.')}"
    )
    wider = case.is_exact and case.hf.dtype == torch.float32 and last.allocated > 0.75 * before.allocated
    return failed(text) if wider else passed(text)


def _read(reader: Reader, ids: Tensor) -> Tensor:
    """Read a text as one block and single tokens. [B, N] int64 -> logits of the last tokens, [B, K, V]."""
    first = 0 if reader.tokens else max(1, ids.shape[1] - 4)
    logits = [reader(ids[:, :first])[:, -1:]] if first else []
    return torch.cat([*logits, *(reader(ids[:, t : t + 1]) for t in range(first, ids.shape[1]))], 1)


def _differs_after(
    case: AuditedCache, name: str, change: Callable[[Reader], None], before: Tensor, after: Tensor, later: Tensor
) -> str:
    """Change a cache that has read texts, and compare its logits with those of a new cache that reads the changed texts.

    Args:
        name: name of the operation, which a cache may refuse.
        before: texts before the change. [B, N] int64.
        after: texts that the cache should hold after the change. [B, N] int64.
        later: next tokens of the texts. [B, N] int64.

    Returns:
        Description of the difference; empty if it is within rounding.

    Raises:
        NotApplicableError: the cache refuses the operation.
    """
    reader, expected = Reader(case.subject, case.hf), Reader(case.subject, case.hf)
    _read(reader, before)
    with refusable(name):
        change(reader)
    _read(expected, after)
    fault = case.differs(_read(reader, later), _read(expected, later), "a new cache")
    return fault and f"after {name}, {fault}"
