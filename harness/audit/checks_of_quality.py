"""Checks of what eviction costs, and of the tokens that a policy of ours holds.

Axis letters: Q query heads, H KV heads, N tokens read, t queries of a chunk, L keys of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvbench.harness.audit.case import AuditedCache, check
from kvbench.harness.audit.subject import Reader
from kvbench.harness.audit.trace import Trace
from kvbench.harness.core.checks import Outcome, failed, passed, require, skipped
from kvbench.harness.data.prose import Prose
from kvbench.harness.engine.watch import Chunk, NotWatchableError, Watcher, watch

_BYTES_A_TOKEN = 16  # of prose; tokens are shorter
_COST = 0.01  # nats; a smaller difference of NLL is rounding


@check("The tokens held are those of our policy of this name.", "another variant of the method: see which tokens differ first")
def like(case: AuditedCache) -> Outcome:
    """Compare the tokens held before every step with those of a policy of ours."""
    if case.like is None:
        return skipped("no policy is named (--like)")
    ours = case.trace(case.steps(case.prompt), by=case.like)
    if ours.error:
        return skipped(f"{case.like.name}: {ours.error}")
    for a, b in zip(case.decode.passes, ours.passes, strict=False):
        for layer, heads in enumerate(zip(a.held, b.held, strict=True)):
            if case.has_window(layer):  # what the window hides may be held or not
                continue
            for head, (mine, theirs) in enumerate(zip(*heads, strict=True)):
                if mine != theirs:
                    more, less = sorted({*mine} - {*theirs})[:5], sorted({*theirs} - {*mine})[:5]
                    held, of_ours = more or "no others", less or "no others"
                    place = f"at step {a.first}, layer {layer}, KV head {head}"
                    return failed(f"{place} holds {held}, and {case.like.name} {of_ours}")
    return passed(f"equal to {case.like.name} at all {len(ours.passes)} steps")


@check("The attention mass of evicted tokens is known.", "")
def attention_mass(case: AuditedCache) -> Outcome:
    """Sum the weights that full attention gives to tokens that are no longer held."""
    first = case.decode.first_eviction
    if first is None:
        return skipped("nothing is evicted")
    lost = _Lost(case.decode)
    try:
        watch(case.hf, lost, input_ids=case.text()[:, : lost.tokens])
    except NotWatchableError as error:
        return skipped(f"the model's attention can't be watched: {error}")
    masses = [float(layer[first:].mean()) for layer in lost.layers]
    worst = max(range(len(masses)), key=masses.__getitem__)
    return passed(f"{sum(masses) / len(masses):.1%} is lost after step {first}, most in layer {worst}: {masses[worst]:.1%}")


@check(
    "Perplexity does not depend on who counts positions.",
    "`get_seq_length` or the positions of keys are wrong",
    ("length", "positions"),
)
def perplexity(case: AuditedCache) -> Outcome:
    """Read generated prose with full attention, with positions passed, and with positions from the cache's length."""
    require(case.tokenizer is not None, "the model has no tokenizer")
    text = case.tokenizer(Prose(0).text(_BYTES_A_TOKEN * case.length), return_tensors="pt")["input_ids"][:, : case.length]
    ids = text.to(case.hf.device)
    full = _nll(case.hf(input_ids=ids, use_cache=False).logits[0].float(), ids)
    from_stream, from_length = (_nll(_read(case, ids, explicit), ids) for explicit in (True, False))
    figures = [
        f"{value.exp():.2f} {name}" for value, name in ((full, "with full attention"), (from_stream, "with positions passed"))
    ]
    evidence = f"{', '.join(figures)}, {from_length.exp():.2f} with those of get_seq_length"
    return failed(evidence) if abs(float(from_stream - from_length)) > _COST else passed(evidence)


def _read(case: AuditedCache, ids: Tensor, explicit: bool) -> Tensor:
    """Return logits of a text that is read by a new cache. [1, N] int64 -> [N, V]."""
    reader = Reader(case.subject, case.hf, explicit)
    return torch.cat([reader(block)[0] for block in ids.split(case.steps(case.prompt)[: ids.shape[1]], 1)])


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean NLL of all tokens but the first. [N, V], [1, N] -> []."""
    return nn.functional.cross_entropy(logits[:-1], ids[0, 1:])


class _Lost(Watcher):
    """Watcher that sums the weights of tokens that a trace did not hold.

    Attributes:
        tokens: N.
        layers: weight lost by each query, averaged over query heads, by layer. [N] each.
    """

    def __init__(self, of: Trace) -> None:
        self.tokens = of.passes[-1].end
        self._held = [self._attended(of, layer) for layer in range(len(of.passes[-1].held))]
        self.layers = [torch.zeros(self.tokens) for _ in self._held]

    def _attended(self, of: Trace, layer: int) -> Tensor:
        """Return which tokens each query could attend to. [H, N, N] bool."""
        attended = torch.zeros(len(of.passes[-1].held[layer]), self.tokens, self.tokens, dtype=torch.bool)
        for p in of.passes:
            for head, tokens in enumerate(p.held[layer]):
                attended[head, p.first : p.end, tokens] = True
                attended[head, p.first : p.end, p.first : p.end] = True
        return attended

    def see_chunk(self, chunk: Chunk) -> None:
        """Sum the weights of a chunk. [1, Q, t, L]."""
        weights, held = chunk.weights[0].cpu(), self._held[chunk.layer]
        queries = slice(chunk.first, chunk.first + weights.shape[1])
        mask = held[:, queries, : weights.shape[2]].repeat_interleave(len(weights) // len(held), 0)
        self.layers[chunk.layer][queries] = weights.masked_fill(mask, 0).sum(-1).mean(0).float()
