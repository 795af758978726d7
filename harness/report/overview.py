"""What a reader chooses by: quality, bytes and latency of every policy of a suite side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from harness.records import Record
from harness.report.intervals import wilson
from harness.report.markdown import count, in_bytes, md, table, title
from harness.report.pairing import paired, past_training, question
from harness.report.sections.latency import speed_up

_CLIFF = math.log(2)  # nats: twice the perplexity
_STRETCH = 4  # runs of tokens that a cliff has at least


@dataclass(frozen=True)
class Row:
    """One policy at one capacity, with all its records of a suite and model."""

    records: Sequence[Record]

    @cached_property
    def perplexity(self) -> Record | None:
        """The record of its first text."""
        return next((r for r in self.records if r.cell["task"].get("name") == "perplexity"), None)

    @cached_property
    def latency(self) -> Record | None:
        """The record of its step."""
        return next((r for r in self.records if r.cell["task"].get("name") == "latency"), None)

    @property
    def cell(self) -> dict[str, Any]:
        """What was asked, but for the task."""
        return self.records[0].cell

    @property
    def nll(self) -> float | None:
        """Nats a token of the first text; None where that failed or was not asked."""
        record = self.perplexity
        return float(record.metrics["nll"]) if record is not None and record.status == "ok" and "nll" in record.metrics else None

    @property
    def answers(self) -> tuple[int, int] | None:
        """Right answers, and of how many, over all tasks with questions."""
        asked = [r.metrics for r in self.records if r.status == "ok" and r.metrics.get("questions") and "right" in r.metrics]
        return (sum(m["right"] for m in asked), sum(m["questions"] for m in asked)) if asked else None

    @property
    def kv_bytes(self) -> int | None:
        """Of K and V where quality was measured, or wherever it was."""
        first = [self.perplexity] if self.perplexity is not None else []
        return next(
            (r.metrics["kv_bytes"] for r in [*first, *self.records] if r.status == "ok" and "kv_bytes" in r.metrics), None
        )

    @property
    def step_ms(self) -> float | None:
        """Of a decode step."""
        record = self.latency
        return float(record.metrics["step_ms"]) if record is not None and record.status == "ok" else None


def rows(records: Sequence[Record]) -> list[Row]:
    """One a policy and capacity, in the order of the records."""
    found: dict[str, list[Record]] = {}
    for record in records:
        cell = record.cell
        asked = [cell[k] for k in ("policy", "parameters", "capacity", "positions", "limit", "seed")]
        found.setdefault(repr(asked), []).append(record)
    return [Row(group) for group in found.values()]


def overview(records: Sequence[Record]) -> list[str]:
    """The table, with the front and ranks; nothing where there is nothing to choose from, or several texts to choose by."""
    if len({r.cell["task"].get("prompt") for r in records if r.cell["task"].get("name") == "lm_eval"}) > 1:
        records = [r for r in records if r.cell["task"].get("name") != "lm_eval"]  # query-aware and query-blind don't mix
    found = rows(records)
    texts = {question(r) for r in records if r.cell["task"].get("name") == "perplexity" and r.status == "ok"}
    if len(found) < 2 or len(texts) > 1 or not any(r.perplexity is not None or r.answers for r in found):
        return []
    best, ranked = front(found), ranks(found)
    columns = {
        "front": any(best),
        "rank": any(ranked),
        "answers": any(r.answers for r in found),
        "step": any(r.step_ms for r in found),
    }
    head = ["policy", "capacity", *(["front"] if columns["front"] else []), *(["rank"] if columns["rank"] else []), "perplexity"]
    head += ["right answers"] if columns["answers"] else []
    head += ["K/V", *(["ms/token", "speed-up on dense"] if columns["step"] else []), "", "repeat"]
    lines = [_line(row, found, star, rank, columns) for row, star, rank in zip(found, best, ranked, strict=True)]
    alignment = "lr" + "c" * columns["front"] + "r" * (len(head) - 4 - columns["front"]) + "ll"
    return table(head, lines, alignment)


def _line(row: Row, others: Sequence[Row], star: bool, rank: str, columns: dict[str, bool]) -> list[str]:
    cells = [md(title(row.perplexity or row.records[0])), count(row.cell["capacity"])]
    cells += ["★" if star else ""] if columns["front"] else []
    cells += [rank] if columns["rank"] else []
    cells += ["" if row.nll is None else f"{math.exp(min(row.nll, 700)):.4g}"]
    if columns["answers"]:
        cells += [_share(row.answers)]
    cells += [in_bytes(row.kv_bytes)]
    if columns["step"]:
        dense = [r.latency for r in others if r.cell["policy"] == "dense" and r.latency is not None]
        ok = row.latency is not None and row.step_ms is not None
        cells += [f"{row.step_ms:.3g}" if ok else "", speed_up(row.latency, dense) if ok and row.latency is not None else ""]
    return [*cells, md("; ".join(labels(row, others))), f"`{row.records[0].cell_id[:8]}`"]


def _share(answers: tuple[int, int] | None) -> str:
    if answers is None:
        return ""
    low, high = wilson(*answers)
    return f"{100 * answers[0] / answers[1]:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def front(found: Sequence[Row]) -> list[bool]:
    """Whether no other is better in one of NLL, bytes and time, and as good in the rest. Not asked of windows run afresh."""
    points = [_point(r) for r in found]
    return [p is not None and not any(q is not None and _dominates(q, p) for q in points) for p in points]


def _point(row: Row) -> tuple[float, float, float | None] | None:
    if row.nll is None or not row.kv_bytes:
        return None
    return row.nll, float(row.kv_bytes), row.step_ms


def _dominates(q: tuple[float, float, float | None], p: tuple[float, float, float | None]) -> bool:
    """Time counts between two that have it: who was not measured is no faster for it."""
    pairs = [(a, b) for a, b in zip(q, p, strict=True) if a is not None and b is not None]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def ranks(found: Sequence[Row]) -> list[str]:
    """Of each among those of its capacity: one more than those that are surely better. Empty without an interval to any.

    Where the text is too short for an interval to some of them it is at least that: "≥ 3".
    """
    result = []
    for row in found:
        rivals = [r.perplexity for r in found if r is not row and r.cell["capacity"] == row.cell["capacity"] is not None]
        to = [paired(row.perplexity, rival) for rival in rivals if row.perplexity is not None and rival is not None]
        known = [interval.low for interval in to if interval is not None and interval.low is not None]
        rank = 1 + sum(low > 0 for low in known)
        result.append("" if not known else str(rank) if len(known) == len(to) else f"≥ {rank}")
    return result


def labels(row: Row, others: Sequence[Row]) -> list[str]:
    """What went wrong: failures by their kind, flags, and the token from which on perplexity is twice that of the best."""
    found = []
    for record in row.records:
        if record.status != "ok":
            error = record.error or {}
            what = (
                f"NaN: {error.get('message')}" if "not finite" in str(error.get("message")) else str(error.get("kind", "failed"))
            )
            found.append(f"{record.cell['task'].get('name')} failed: {what}")
        found += [str(flag) for flag in record.metrics.get("flags") or []]
    at = cliff(row, others)
    return [*dict.fromkeys(found), *([f"cliff at token {at:,}"] if at is not None else [])]


def cliff(row: Row, others: Sequence[Row]) -> int | None:
    """The token from which on this has more than twice the perplexity of the best with a bounded cache; None if there is none.

    The first from which the mean difference stays above that, however far one reads on.
    """
    record = row.perplexity
    bounded = [
        r
        for r in others
        if r is not row and r.nll is not None and r.kv_bytes and r.perplexity and not past_training(r.perplexity)
    ]
    best = min(bounded, key=lambda r: r.nll or math.inf, default=None)
    if (
        record is None
        or record.status != "ok"
        or best is None
        or best.perplexity is None
        or question(record) != question(best.perplexity)
    ):
        return None
    ours, theirs = record.metrics.get("blocks"), best.perplexity.metrics.get("blocks")
    if not ours or not theirs or ours["tokens"] != theirs["tokens"] or len(ours["tokens"]) <= 2 * _STRETCH:
        return None
    tokens = np.array(ours["tokens"], np.float64)
    off = np.array(ours["nll_sum"]) - np.array(theirs["nll_sum"])
    if off[-_STRETCH:].sum() <= _CLIFF * tokens[-_STRETCH:].sum():
        return None  # it does not last
    for start in range(len(off) - _STRETCH):
        means = np.cumsum(off[start:]) / np.maximum(np.cumsum(tokens[start:]), 1)
        if means[_STRETCH:].min() > _CLIFF:
            first = start + int(np.argmax(off[start:] > _CLIFF * tokens[start:]))
            return first * int(ours["size"])
    return None
