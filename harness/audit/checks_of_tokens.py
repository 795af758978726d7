"""Checks of what a cache holds while it reads one text token by token."""

from __future__ import annotations

from itertools import pairwise

from kvbench.harness.audit.attended import UNKNOWN
from kvbench.harness.audit.case import AuditedCache, check
from kvbench.harness.audit.trace import FAULTS, Pass, placement
from kvbench.harness.core.checks import Outcome, failed, judged, passed, require, skipped

_MOST_ALLOCATED = 1.5  # maximum of allocated bytes, relative to the bytes of the tokens held and of one new token


@check("A prompt and single tokens are read without an exception.", "the cache does not implement the interface of `Cache`")
def reads(case: AuditedCache) -> Outcome:
    """Read a prompt and single tokens."""
    decode = case.decode
    return judged(decode.error, f"{len(decode.logits)} tokens, {len(decode.passes)} forward passes")


@check("Tokens are evicted once there are more than the budget.", "eviction is never called, or its result is not stored")
def eviction(case: AuditedCache) -> Outcome:
    """Check that something is evicted."""
    first, size, last = case.decode.first_eviction, case.subject.budget, case.decode.passes[-1]
    if first is not None:
        return passed(f"the first token is evicted at step {first}; at step {last.first} {last.mean_held:g} are held")
    if size is None and case.subject.press is None:
        return skipped(f"all {last.first} tokens are held, and no budget is given")
    return failed(f"all {last.first} tokens are held at step {last.first}" + ("" if size is None else f", budget {size}"))


@check(
    "Between steps, the budget is held: not more and, once full, not less.",
    "an off-by-one, or eviction before the new token",
    ("eviction",),
)
def budget(case: AuditedCache) -> Outcome:
    """Compare the tokens held before every step with the budget."""
    size = case.subject.budget
    if size is None:
        return skipped("no budget is given")
    passes = _after_prompt(case)
    over = next((p for p in passes if p.mean_held > size), None)
    if over is not None:
        return failed(f"at step {over.first} it holds {over.mean_held:g} tokens, budget {size}")
    full = [p for p in passes if p.first > size]
    most = max((p.most_held for p in full), default=size)
    if most < size:
        return failed(f"from step {full[0].first} on it holds at most {most} tokens, budget {size}")
    least = min((p.mean_held for p in full), default=size)
    return passed(
        f"{least:g} to {size} tokens are held after step {size}" if least < size else f"{size} tokens from step {size} on"
    )


@check("Between steps, allocated bytes are those of the tokens held.", "K and V are views of a longer storage")
def memory(case: AuditedCache) -> Outcome:
    """Compare the storage of the cache's tensors between the last two steps with the tokens held there."""
    before, last = case.decode.passes[-2:]
    held, token_bytes = last.mean_held, case.decode.token_bytes
    text = f"{before.allocated:,} bytes are allocated between steps, before step {last.first}; {held:g} tokens are held"
    text += f", of {token_bytes:,.0f} bytes each"
    require(case.decode.first_eviction is not None, f"nothing is evicted: {text}")
    return failed(text) if before.allocated > _MOST_ALLOCATED * token_bytes * (held + 1) else passed(text)


@check("Every row is one token read, with its own key and value.", "stale slots, or K and V gathered by other indices")
def rows(case: AuditedCache) -> Outcome:
    """Identify the rows that `update` returns with the keys and values that were given."""
    rounding = "" if case.is_exact else f", rounded by up to {case.decode.rounding:.0%}"
    return _recorded(case, "rows", f"all rows of {len(case.decode.passes)} passes are tokens read{rounding}")


@check("Two runs with one seed are equal.", "randomness that `torch.manual_seed` does not control")
def determinism(case: AuditedCache) -> Outcome:
    """Read the text again after seeding PyTorch's generator alike."""
    again = case.trace(case.shortened)
    for a, b in zip(case.decode.passes, again.passes, strict=False):
        if a.held != b.held:
            return failed(f"two runs after torch.manual_seed(0) hold other tokens at step {a.first}")
    fault = case.differs(again.logits, case.decode.logits[: len(again.logits)], "another run")
    return judged(fault, "two runs are equal")


@check(
    "The first tokens stay: those of `--sinks`, otherwise those that survive the first eviction.",
    "indices in the text are used as indices in the cache",
    follows=("determinism",),
)
def sinks(case: AuditedCache) -> Outcome:
    """Check that sinks are held at every step."""
    require(case.decode.first_eviction is not None, "nothing is evicted")
    if not case.sinks:
        ends = [0 in head for layer in case.decode.passes[-1].held for head in layer]
        held = f"token 0 is held at the end by {sum(ends)} of {len(ends)} KV heads"
        return skipped(f"none are declared, and none survive the first eviction in all heads; {held}")
    source = "" if case.subject.sinks else "; not declared, but they survive the first eviction"
    fault = case.lost_sink(case.decode)
    return judged(fault and f"{fault}{source}", f"the first {case.sinks} tokens are held at every step{source}")


@check("The newest rows are the block's own tokens, in order.", "new rows are written into slots of evicted tokens")
def order(case: AuditedCache) -> Outcome:
    """Check that a block's own tokens are the last rows."""
    known = [[t for t in row if t != UNKNOWN] for p in case.decode.passes for read in p.reads for row in read.tokens.tolist()]
    is_sorted = all(a < b for row in known for a, b in pairwise(row))
    return _recorded(case, "order", "rows are in order of time" if is_sorted else "own tokens last; older rows in another order")


@check(
    "A query sees all rows held, or those in the layer's sliding window, and no later token.",
    "`get_mask_sizes` does not fit the rows that `update` returns",
)
def mask(case: AuditedCache) -> Outcome:
    """Check the attention mask that transformers makes from the cache's sizes."""
    windows = sorted({read.window for p in case.decode.passes for read in p.reads if read.window})
    inside = f"; in layers with a sliding window, those of the last {', '.join(map(str, windows))} tokens" if windows else ""
    return _recorded(case, "mask", f"every query sees all rows of earlier tokens{inside}")


@check("`get_seq_length` is the number of tokens read.", "rows held are counted, so that RoPE repeats positions")
def length(case: AuditedCache) -> Outcome:
    """Compare `get_seq_length` with the number of tokens read. Any other length passes only if keys are placed by rank."""
    wrong = next((p for p in case.decode.passes if p.length != p.end), None)
    if wrong is None:
        return passed(f"{case.decode.passes[-1].length} after {case.decode.passes[-1].end} tokens")
    text = f"get_seq_length says {wrong.length} after {wrong.end} tokens"
    if not case.is_ours and placement(case.asking) == ("rank", "") and case.decode.first_eviction is not None:
        return passed(f"{text}: keys are placed by rank, among the rows held")
    return failed(text)


@check(
    "RoPE puts every key at its position in the stream, or at its rank.",
    "keys are not moved when ranks change, or moved twice",
    ("rows",),
)
def positions(case: AuditedCache) -> Outcome:
    """Measure distances between queries and keys, both with positions from the cache's length and with positions passed."""
    require(not case.is_ours, "the decoder of a policy places keys: positions 'stream'")
    require(bool(case.rotations), "RoPE of this model can't be measured")
    passed_on = case.decode if case.subject.press is not None else case.trace(case.shortened, explicit=True)
    drivers = {"called directly": case.asking, "with positions of `generate`": passed_on}
    modes, faults = [], []
    for driver, of in drivers.items():
        mode, fault = placement(of)
        faults += [f"{driver}, {of.error or fault}"] if of.error or fault else []
        modes += [] if of.error or fault else [f"at their {'ranks' if mode == 'rank' else 'positions in the stream'}"]
    is_enough = modes if case.subject.press is not None else not faults  # who runs a press chooses the positions
    return passed(f"keys are {modes[0]}") if is_enough else failed(faults[0])


def _recorded(case: AuditedCache, kind: str, evidence: str) -> Outcome:
    """Return the outcome of a check that looks for one kind of fault in the rows that `update` returns."""
    require(not case.is_ours, "the decoder of a policy answers the model's calls")
    return judged(FAULTS[kind](case.decode), evidence)


def _after_prompt(case: AuditedCache) -> list[Pass]:
    """Return the passes to which the budget applies: all, or the first after the prompt for a press that cuts prompts."""
    press = case.subject.press
    return case.decode.passes[1:2] if press is not None and press.cuts_prompts else case.decode.passes
