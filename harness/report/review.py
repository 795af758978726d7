"""The page about a submission: what is wrong with it, what was measured again, and how it compares with what stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import QuestionMetrics, ScoreMetrics
from kvbench.harness.records.rules import PART_NATS
from kvbench.harness.report import gate, gate_times, sections
from kvbench.harness.report.compare import MARGINS, JudgedMetric, cell_name, differences, setup_changes, summary
from kvbench.harness.report.compare import markdown as comparison
from kvbench.harness.report.markdown import md, table
from kvbench.harness.report.pairing import question

# The gate's checks of times, and those that notice a regression of the code, which is no fault of the record. Means are compared
# below, as closely as rounding allows.
_NOT_OF_FIGURES = {*gate_times.CHECKS, "method", "flags", "quality"}
_MEANS = ("nll", "accuracy", "score")
_ROUNDING = 1e-9


def disagreements(submitted: Record, again: Record, folders: tuple[Path, Path]) -> list[str]:
    """How a cell that was measured again differs from the submitted record; empty if they agree.

    On the same machine in float32, every figure and every token must agree up to the gate's tolerances for rounding, on another
    CPU nearly so. Elsewhere a policy that chooses by attention may keep another token, so only what rounding can't change must be
    equal. Everywhere the means must agree: NLL within 1e-4 nats in float32, else within the margins of `bench compare`, or by one
    question.

    Args:
        submitted: the record to check; its cell went well.
        again: the same cell, measured here.
        folders: of the two records and their traces.
    """
    if again.status != "ok":
        return [f"the cell failed: {again.error.kind if again.error else '?'}"]
    findings = gate.check(([submitted], folders[0]), ([again], folders[1]), {})
    unlike = [f for f in findings if f.state in ("regression", "could not compare") and f.check not in _NOT_OF_FIGURES]
    return [*_means(submitted, again), *(f"{f.check}: {f.says}" for f in unlike)]


def _means(submitted: Record, again: Record) -> list[str]:
    """The means that differ by more than their margin."""
    unlike = []
    for d in differences(submitted, again):
        if d.metric not in _MEANS or d.a is None or d.b is None:
            continue
        allowed = PART_NATS if d.metric == "nll" and submitted.cell.model.dtype == "float32" else MARGINS[d.metric]
        asked = again.measured(QuestionMetrics)
        if asked is not None and asked.questions:
            allowed = max(allowed, 1 / asked.questions)
        if abs(d.b - d.a) > allowed + _ROUNDING:
            unlike.append(f"{d.metric} {d.a:.6g} was submitted, {d.b:.6g} measured; {allowed:.3g} may lie between them")
    return unlike


@dataclass(frozen=True)
class Repeat:
    """A submitted cell that was drawn to be measured again."""

    submitted: Record
    again: Record | None = None  # measured here
    differs: Sequence[str] = ()  # how; empty if the two agree
    refused: str = ""  # why it can't be measured here


@dataclass(frozen=True)
class Review:
    """What is known of a submission."""

    records: Sequence[Record]  # that it adds or changes
    stands: Sequence[Record]  # before it
    problems: Sequence[str]  # a line each
    repeatable: int = 0  # cells that could be drawn
    repeats: Sequence[Repeat] = ()  # those that were drawn; none if there are problems
    seed: str = ""  # of the draw

    @property
    def accepted(self) -> bool:
        """Whether nothing is wrong and no repeated cell differs."""
        return not self.problems and not any(repeat.differs for repeat in self.repeats)


def markdown(review: Review) -> str:
    """The review as Markdown."""
    groups = Counter(f"{r.cell.suite} v{r.cell.suite_version} on {r.cell.model.id}" for r in review.records)
    counts = [f"{_number(count, 'record')} of {md(name)}" for name, count in groups.items()]
    lines = [f"### Submission: {', '.join(counts) or 'no records'}\n"]
    if review.problems:
        lines += [f"**{_number(len(review.problems), 'problem')}**\n", *(f"- {md(p)}" for p in review.problems), ""]
        return "\n".join([*lines, "No cell was measured again.\n"])
    if not review.records:
        return "\n".join([*lines, "No record is new or changed.\n"])
    lines.append("Every figure that follows from a trace or from other figures is right.\n")
    lines += _repeats(review)
    shown, tallies = [], []
    for record in review.records:
        rivals, others = _against(record, review.stands)
        shown += others
        at_capacity = f"against the {len(rivals)} at its capacity: {summary(rivals)}"
        tallies += [f"- {md(cell_name(record, record))}, {at_capacity}"] if rivals else []
    lines += [comparison(shown, "what stands", "the submission")] if shown else ["Nothing comparable stands.\n"]
    return "\n".join([*lines, *tallies, ""])


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _repeats(review: Review) -> list[str]:
    """What was measured again."""
    if not review.repeatable:
        return ["No cell can be measured again here: none has a built-in model and figures that don't depend on the machine.\n"]
    done = [repeat for repeat in review.repeats if repeat.again is not None]
    unlike = sum(bool(repeat.differs) for repeat in done)
    verdict = f"**{unlike} of them differ{'s' if unlike == 1 else ''}**" if unlike else "all agree" if done else "none could be"
    return [
        f"Measured again: {len(done)} of {review.repeatable} cells, drawn with the seed `{md(review.seed)}`: {verdict}.\n",
        *table(["cell", "submitted", "measured", "result", "machine"], [_row(r) for r in review.repeats], "lrrll"),
    ]


def _row(repeat: Repeat) -> list[str]:
    submitted, again = repeat.submitted, repeat.again
    cell, figure = md(cell_name(submitted, submitted)), md(sections.headline(submitted))
    if again is None:
        return [cell, figure, "", f"not measured: {md(repeat.refused)}", ""]
    result = f"**differs**: {md('; '.join(repeat.differs))}" if repeat.differs else "agrees"
    return [cell, figure, md(sections.headline(again)), result, md(setup_changes(submitted, again, "torch") or "alike")]


def _against(record: Record, stands: Sequence[Record]) -> tuple[list[JudgedMetric], list[JudgedMetric]]:
    """A record's main figure against every other policy at its capacity; and against what it replaces, the best there, and dense.

    All of them read the same text, and evict at the same moments.
    """
    cell, alike = record.cell, [r for r in stands if question(r) == question(record)]
    rivals = _judged(
        record,
        [
            r
            for r in alike
            if (r.cell.capacity, r.cell.evicts, r.cell.stored) == (cell.capacity, cell.evicts, cell.stored)
            and r.cell_id != record.cell_id
        ],
    )
    scores = record.measured(ScoreMetrics)
    more_is_better = scores.higher_is_better if scores and scores.scores is not None else not hasattr(record.metrics, "nll")
    best = sorted(rivals, key=lambda j: j.difference.a or 0.0, reverse=more_is_better)[:1]
    replaced = _judged(record, [r for r in stands if r.cell_id == record.cell_id])
    dense = _judged(record, [r for r in alike if r.cell.is_dense])
    return rivals, list({id(j.a): j for j in [*replaced, *best, *dense]}.values())


def _judged(record: Record, others: Iterable[Record]) -> list[JudgedMetric]:
    """The main figure of a record against that of others."""
    judged = []
    for other in others:
        means = [d for d in differences(other, record) if d.metric in ("nll", "accuracy", "score")]
        judged += [JudgedMetric(other, record, d) for d in means[:1]]
    return judged
