"""Verdicts on many pairs of records, as table rows, JSON and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.harness.records import Record
from kvbench.harness.report.compare import differences, matched
from kvbench.harness.report.difference import Difference, Traces, Verdict
from kvbench.harness.report.markdown import md, table, title
from kvbench.harness.report.sources import find_trace
from kvbench.harness.report.task import task_of

_ORDER: tuple[Verdict, ...] = ("worse", "can't tell", "better", "same")


@dataclass(frozen=True)
class JudgedMetric:
    """One metric of one pair of records."""

    a: Record
    b: Record
    difference: Difference

    @property
    def cell(self) -> str:
        """Description of the cell."""
        return cell_name(self.a, self.b)

    def cells(self) -> dict[str, Any]:
        """The row of the table."""
        d = self.difference
        interval = "" if d.low is None or d.high is None else f"[{_signed(d.low, d)}, {_signed(d.high, d)}]"
        change = "" if d.change is None else _signed(d.change, d)
        return {
            "cell": self.cell, "metric": d.metric, "a": _plain(d.a), "b": _plain(d.b), "change": change,
            "95 % interval": interval, "verdict": d.verdict, "why": d.why,
        }  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """All figures, unrounded."""
        return {"cell": self.cell, "cell_ids": [self.a.cell_id, self.b.cell_id], **vars(self.difference)}


def judge_all(a: tuple[Sequence[Record], Path], b: tuple[Sequence[Record], Path]) -> list[JudgedMetric]:
    """Compare every metric of every pair of the same cell; worst first.

    Args:
        a: reference records and their folder.
        b: records to judge and their folder.
    """
    pairs = [(x, y, (find_trace(x, a[1]), find_trace(y, b[1]))) for x, y in matched(a[0], b[0])]
    judged = [JudgedMetric(x, y, difference) for x, y, traces in pairs for difference in _differences(x, y, traces)]
    return sorted(judged, key=lambda j: _ORDER.index(j.difference.verdict))


def _differences(a: Record, b: Record, traces: Traces) -> list[Difference]:
    """Differences of two records; if their figures or traces are invalid, one that says so."""
    try:
        return differences(a, b, traces)
    except Exception as error:  # whatever is wrong with them, the other pairs are compared
        why = f"can't be compared ({type(error).__name__}: {error})"
        return [Difference("record", None, None, None, None, None, "can't tell", why)]


def summary(judged: Sequence[JudgedMetric]) -> str:
    """Number of each verdict."""
    counts = Counter(j.difference.verdict for j in judged)
    return ", ".join(f"{counts[v]} {v}" for v in _ORDER if counts[v])


def markdown(judged: Sequence[JudgedMetric], a: str, b: str) -> str:
    """A comment for a pull request: a table of changes, with unchanged metrics folded."""
    head = ["cell", "metric", md(a), md(b), "change", "95 % interval", "verdict", "why"]
    rows = [[md(value) for value in j.cells().values()] for j in judged]
    changed = [r for r, j in zip(rows, judged, strict=True) if j.difference.verdict != "same"]
    unchanged = [r for r, j in zip(rows, judged, strict=True) if j.difference.verdict == "same"]
    lines = [f"### {md(b)} against {md(a)}: {summary(judged)}\n"]
    lines += table(head, changed, "llrrrrll") if changed else ["Nothing changed that matters.\n"]
    if unchanged:
        lines += [f"<details><summary>{len(unchanged)} the same</summary>\n", *table(head, unchanged, "llrrrrll"), "</details>\n"]
    return "\n".join(lines)


def cell_name(a: Record, b: Record) -> str:
    """Description of a cell, or of the two that are compared."""
    where, which = zip(*(_named(r) for r in (a, b)), strict=True)
    return f"{' -> '.join(dict.fromkeys(where))}, {' -> '.join(dict.fromkeys(which))}"


def _named(record: Record) -> tuple[str, str]:
    cell = record.cell
    capacity = f" at {cell.capacity}" if cell.capacity is not None else ""
    options = [f"{k} {cell.options[k]}" for k in task_of(record).named_by if k in cell.options]
    return f"{cell.suite}: {cell.model.id}, {' '.join([cell.task.name, *options])}", f"{title(record)}{capacity}"


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 100 else f"{value:.5g}"


def _signed(value: float, difference: Difference) -> str:
    if difference.metric == "step_ms":
        return f"{100 * value:+.1f} %"
    if difference.metric == "accuracy":
        return f"{100 * value:+.1f} points"
    return f"{value:+,.0f}" if value == int(value) and abs(value) >= 100 else f"{value:+.4g}"
