"""Which policy of a run is best, and its price against dense, as far as intervals support it. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.harness.core.intervals import median_interval
from kvbench.harness.report.outcomes import answer_pairs, shared_outcomes
from kvbench.harness.report.pairing import paired, past_training
from kvbench.harness.report.ranks import Pairs, nll_pairs, surely_less
from kvbench.harness.report.rows import Row
from kvbench.harness.report.speed import round_ratios

_MAX_NAMES = 6  # in a sentence
_TOO_SHORT = "the text is too short for an interval"


@dataclass(frozen=True)
class Contender:
    """A policy of a table.

    Attributes:
        row: its records.
        name: in the table.
        nll: nats per token, over the tokens that all rows scored; None if not measured.
        wrong: share of wrong answers, over the questions that all rows answered; None if not measured.
    """

    row: Row
    name: str
    nll: float | None
    wrong: float | None


@dataclass(frozen=True)
class _Measure:
    """What policies are judged by.

    Attributes:
        name: for sentences.
        value: the figure, less is better; None if not measured.
        pairs: differences of all comparable pairs of rows.
        price: `price(best, base, name)` says what `best` loses or gains against `base`, called `name`.
        no_pairs: reason given when no two rows are comparable.
    """

    name: str
    value: Callable[[Contender], float | None]
    pairs: Callable[[Sequence[Row]], Pairs]
    price: Callable[[Row, Row, str], str]
    no_pairs: str


def best_policies(contenders: Sequence[Contender]) -> list[str]:
    """For each capacity, a sentence on the best policy with a cache of that size: what it loses, what it saves.

    Policies are judged by perplexity, or by right answers if no perplexity was measured.

    Args:
        contenders: all policies of a table, measured on one text.
    """
    for measure in (_NLL, _ANSWERS):
        scored = [c for c in contenders if measure.value(c) is not None]
        capacities = sorted({size for c in scored if c.row.kv_bytes and (size := c.row.cell.capacity) is not None})
        lines = [line for capacity in capacities if (line := _at_capacity(scored, capacity, measure))]
        if lines and measure is _NLL and any(_has_trend(c) for c in scored):
            lines.append("Dense read past its training length, so its perplexity is not used as a yardstick.")
        if scored:
            return lines
    return []


def _at_capacity(scored: Sequence[Contender], capacity: int, measure: _Measure) -> str:
    """A sentence on the policies of one capacity; empty if there is nothing to say."""
    rivals = [c for c in scored if c.row.cell.capacity == capacity and c.row.kv_bytes]
    pairs = measure.pairs([c.row for c in rivals])
    beaten = {index for _, index in surely_less(pairs)}
    leaders = sorted((c for index, c in enumerate(rivals) if index not in beaten), key=lambda c: measure.value(c) or 0.0)
    best, at, field = leaders[0], f"At {capacity:,} tokens", f"of {len(rivals)} policies by {measure.name}"
    price = _price(best, scored, capacity, measure)
    if len(rivals) == 1:
        return f"{at}, {best.name} {price}." if price else ""
    if not pairs:
        return f"{at}, the best {field} can't be determined: {measure.no_pairs}."
    if len(leaders) == 1:
        return f"{at}, {best.name} is surely the best {field}{f': it {price}' if price else ''}."
    about_best = f"Of these, {best.name} {price}." if price else ""
    if len(leaders) == len(rivals):
        return f"{at}, none is surely the best {field}. {about_best}".strip()
    return (
        f"{at}, the best {field} is {_either(leaders)}; the differences between them are within the noise. {about_best}".strip()
    )


def _either(leaders: Sequence[Contender]) -> str:
    names = [c.name for c in leaders[:_MAX_NAMES]]
    return (
        f"{', '.join(names[:-1])} or {names[-1]}"
        if len(leaders) <= _MAX_NAMES
        else f"one of {len(leaders)}, {names[0]} among them"
    )


def _price(best: Contender, scored: Sequence[Contender], capacity: int, measure: _Measure) -> str:
    """What the best loses and saves against dense; its loss is against the best recomputed window if dense is no yardstick."""
    dense = next((c for c in scored if c.row.cell.policy == "dense"), None)
    recomputed = [c for c in scored if c.row.cell.capacity == capacity and not c.row.kv_bytes]
    recompute = min(recomputed, key=lambda c: measure.value(c) or 0.0, default=None)
    parts = []
    if dense is not None and not (measure is _NLL and _has_trend(dense)):
        parts = [measure.price(best.row, dense.row, "dense")]
    elif recompute is not None:
        parts = [measure.price(best.row, recompute.row, recompute.name)]
    parts += _savings(best.row, dense.row) if dense is not None else []
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _has_trend(contender: Contender) -> bool:
    return contender.row.perplexity is not None and past_training(contender.row.perplexity)


def _savings(best: Row, dense: Row) -> list[str]:
    """What it saves in K/V, and in step time if both were timed in the same rounds and surely differ."""
    saved = []
    if best.kv_bytes and dense.kv_bytes and best.kv_bytes < dense.kv_bytes:
        times = dense.kv_bytes / best.kv_bytes
        saved.append(f"keeps {f'1/{times:.0f}' if times >= 1.95 else f'{100 / times:.0f} %'} of dense's K/V")
    ratios = round_ratios(best.latency, dense.latency) if best.latency is not None and dense.latency is not None else None
    if ratios:
        low, high = median_interval(ratios)
        if high < 1 or low > 1:
            saved.append(f"takes {statistics.median(ratios):.3g} of dense's time per step [{low:.3g}, {high:.3g}]")
    return saved


def _nll_price(best: Row, base: Row, name: str) -> str:
    interval = None if best.perplexity is None or base.perplexity is None else paired(best.perplexity, base.perplexity)
    if interval is None:
        return f"can't be compared with {name} (not the same tokens)"
    if interval.low is None or interval.high is None:
        return f"can't be compared with {name} ({_TOO_SHORT})"
    if interval.low <= 0 <= interval.high:
        return (
            f"doesn't surely differ from {name} ({interval.mean:+.2g} nats per token [{interval.low:+.2g}, {interval.high:+.2g}])"
        )
    low, high = sorted((abs(interval.low), abs(interval.high)))
    change = "loses" if interval.mean > 0 else "gains"
    return f"{change} {abs(interval.mean):.2g} nats per token [{low:.2g}, {high:.2g}] against {name}"


def _answer_price(best: Row, base: Row, name: str) -> str:
    shared = shared_outcomes(base, best)
    if shared is None:
        return f"can't be compared with {name} (not the same questions)"
    if shared.ends is None:
        return f"can't be compared with {name} (too few streams for an interval)"
    low, high = (100 * x for x in shared.ends)
    change = 100 * shared.change
    if low <= 0 <= high:
        return f"doesn't surely differ from {name} ({change:+.1f} points of right answers [{low:+.1f}, {high:+.1f}])"
    smaller, larger = sorted((abs(low), abs(high)))
    return f"gets {abs(change):.1f} points {'more' if change > 0 else 'fewer'} right [{smaller:.1f}, {larger:.1f}] than {name}"


_NLL = _Measure("perplexity", lambda c: c.nll, lambda rows: nll_pairs([row.perplexity for row in rows]), _nll_price, _TOO_SHORT)
_ANSWERS = _Measure("right answers", lambda c: c.wrong, answer_pairs, _answer_price, "not the same questions, or too few streams")
