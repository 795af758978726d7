"""The overview table: quality, bytes and latency of every policy of a suite side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.common_tokens import Common, common_tokens, describe_tokens, on_common, scores_all
from kvbench.harness.report.faults import faults
from kvbench.harness.report.feed.question import poolable
from kvbench.harness.report.front import front
from kvbench.harness.report.markdown import bracketed, cache_bytes, count, md, table, title
from kvbench.harness.report.pairing import question
from kvbench.harness.report.ranks import nll_pairs, rank_intervals
from kvbench.harness.report.rows import Row, rows
from kvbench.harness.report.shares import Answers
from kvbench.harness.report.speed import speed_up

_UNKNOWN = "–"


@dataclass(frozen=True)
class _Line:
    """A row, compared with the others.

    Attributes:
        row: the policy's records.
        rank: best and worst possible rank among policies of its capacity; None if unknown.
        on_front: None if unknown.
        perplexity: over the tokens that every row scored; None if not measured.
    """

    row: Row
    rank: tuple[int, int] | None
    on_front: bool | None
    perplexity: float | None


def overview(records: Sequence[Record]) -> list[str]:
    """The table with the front and ranks; empty if there are fewer than two policies, several texts, or no quality.

    Args:
        records: of one suite and model, measured on one machine.
    """
    policies = rows(poolable(records))
    texts = {question(r) for row in policies for r in row.records if r.measured(NllMetrics)}
    if len(policies) < 2 or len(texts) > 1 or not any(r.perplexity is not None or r.answers for r in policies):
        return []
    scored = [r.perplexity for r in policies if r.perplexity is not None and r.nll is not None]
    common = common_tokens(scored)
    ranked = zip(policies, ranks(policies), front(policies), strict=True)
    lines = sorted((_Line(row, rank, on_front, _common_perplexity(row, common)) for row, rank, on_front in ranked), key=_order)
    columns = _columns(lines, common)
    cells = [[column.text(line) for column in columns] for line in lines]
    note = [f"Perplexity is over {describe_tokens(scored, common)}.\n"] if not common.are_all else []
    return [*note, *table([c.head for c in columns], cells, "".join(c.alignment for c in columns))]


def ranks(policies: Sequence[Row]) -> list[tuple[int, int] | None]:
    """(best, worst) possible rank in NLL of each cache among those of its capacity; None if unknown."""
    result: list[tuple[int, int] | None] = [None] * len(policies)
    for capacity in {r.cell.capacity for r in policies}:
        rivals = [i for i, r in enumerate(policies) if r.cell.capacity == capacity and r.nll is not None and r.kv_bytes != 0]
        intervals = rank_intervals(len(rivals), nll_pairs([policies[i].perplexity for i in rivals]))
        for i, rank in zip(rivals, intervals, strict=True):
            result[i] = rank
    return result


def _common_perplexity(row: Row, common: Common) -> float | None:
    record = on_common(row.perplexity, common) if row.perplexity is not None and row.nll is not None else None
    metrics = None if record is None else record.measured(NllMetrics)
    return None if metrics is None else math.exp(min(metrics.nll, 700))


def _order(line: _Line) -> tuple[float, ...]:
    """Sort key: by capacity, dense first; then by best rank and perplexity, missing ones last."""
    best = math.inf if line.rank is None else line.rank[0]
    return line.row.cell.capacity or 0, best, math.inf if line.perplexity is None else line.perplexity


@dataclass(frozen=True)
class _Column:
    head: str
    alignment: str  # l, c or r
    text: Callable[[_Line], str]
    shown: bool = True


def _columns(lines: Sequence[_Line], common: Common) -> list[_Column]:
    """The columns that are not empty."""
    others = [line.row for line in lines]
    dense = [r.latency for r in others if r.cell.policy == "dense" and r.latency is not None]
    columns = [
        _Column("policy", "l", lambda x: md(title(x.row.perplexity or x.row.records[0]))),
        _Column("capacity", "r", lambda x: count(x.row.cell.capacity)),
        _Column("front", "c", _star, any(line.on_front for line in lines)),
        _Column("rank", "r", lambda x: _rank(x.rank), any(line.rank for line in lines)),
        _Column("perplexity", "r", lambda x: "" if x.perplexity is None else f"{x.perplexity:.4g}"),
        _Column("on all tokens", "r", lambda x: _on_all(x.row), not common.are_all),
        _Column("right answers", "r", lambda x: _share(x.row.answers), any(r.answers for r in others)),
        _Column("K/V", "r", lambda x: cache_bytes(x.row.kv_bytes)),
        _Column(
            "ms/token", "r", lambda x: "" if x.row.step_ms is None else f"{x.row.step_ms:.3g}", any(r.step_ms for r in others)
        ),
        _Column("speed-up over dense", "r", lambda x: _speed_up(x.row, dense), any(r.step_ms for r in others)),
        _Column("", "l", lambda x: md("; ".join(faults(x.row, others)))),
        _Column("repeat", "l", lambda x: f"`{x.row.records[0].cell_id[:8]}`"),
    ]
    return [column for column in columns if column.shown]


def _star(line: _Line) -> str:
    eligible = line.row.nll is not None and line.row.kv_bytes
    return {True: "★", False: "", None: _UNKNOWN if eligible else ""}[line.on_front]


def _rank(rank: tuple[int, int] | None) -> str:
    if rank is None:
        return _UNKNOWN
    return str(rank[0]) if rank[0] == rank[1] else f"{rank[0]}–{rank[1]}"


def _on_all(row: Row) -> str:
    """Perplexity over all tokens; empty if some were not scored."""
    if row.nll is None or row.perplexity is None or not scores_all(row.perplexity):
        return ""
    return f"{math.exp(min(row.nll, 700)):.4g}"


def _speed_up(row: Row, dense: Sequence[Record]) -> str:
    return speed_up(row.latency, dense) if row.latency is not None and row.latency.status == "ok" else ""


def _share(answers: Answers | None) -> str:
    return "" if answers is None else f"{100 * answers.share:.0f} %{bracketed(answers.ends) or ' [too few streams]'}"
