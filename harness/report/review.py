"""The page about a submission: what is wrong with it, what was measured again, and how it compares with what stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvbench.harness.records import Record
from kvbench.harness.records.metrics import ScoreMetrics
from kvbench.harness.report import sections
from kvbench.harness.report.compare import differences, setup_changes
from kvbench.harness.report.difference import Verdict
from kvbench.harness.report.markdown import md, table
from kvbench.harness.report.pairing import question
from kvbench.harness.report.verdicts import JudgedMetric, cell_name
from kvbench.harness.report.verdicts import markdown as comparison

_VERDICTS: tuple[Verdict, ...] = ("better", "same", "worse", "can't tell")


@dataclass(frozen=True)
class Repeat:
    """A submitted cell that was drawn to be measured again.

    Attributes:
        submitted: its record.
        again: the record measured here; None if the cell can't be measured here.
        differs: how the two differ; empty if they agree.
        refused: why it can't be measured here.
    """

    submitted: Record
    again: Record | None = None
    differs: Sequence[str] = ()
    refused: str = ""


@dataclass(frozen=True)
class Review:
    """What is known of a submission.

    Attributes:
        records: that it adds or changes.
        stands: the records before it.
        problems: what is wrong with it, a line each.
        repeatable: number of its cells that could be drawn.
        repeats: those that were drawn. None is if there are problems.
        seed: of the draw.
    """

    records: Sequence[Record]
    stands: Sequence[Record]
    problems: Sequence[str]
    repeatable: int = 0
    repeats: Sequence[Repeat] = field(default_factory=tuple)
    seed: str = ""

    @property
    def accepted(self) -> bool:
        """Whether nothing is wrong and no repeated cell differs."""
        return not self.problems and not any(repeat.differs for repeat in self.repeats)


def markdown(review: Review) -> str:
    """The review as Markdown."""
    groups = Counter(f"{r.cell.suite} v{r.cell.suite_version} on {r.cell.model.id}" for r in review.records)
    counts = [f"{count} record{'' if count == 1 else 's'} of {md(name)}" for name, count in groups.items()]
    lines = [f"### Submission: {', '.join(counts) or 'no records'}\n"]
    if review.problems:
        number = len(review.problems)
        lines += [f"**{number} problem{'' if number == 1 else 's'}**\n", *(f"- {md(p)}" for p in review.problems), ""]
        return "\n".join([*lines, "No cell was measured again.\n"])
    if not review.records:
        return "\n".join([*lines, "No record is new or changed.\n"])
    lines.append("Every figure that follows from a trace or from other figures is right.\n")
    lines += _repeats(review)
    judged = [j for record in review.records for j in against_standing(record, review.stands)]
    lines += [comparison(judged, "what stands", "the submission")] if judged else ["Nothing comparable stands.\n"]
    tallies = [line for record in review.records for line in _tally(record, review.stands)]
    return "\n".join([*lines, *tallies, ""])


def against_standing(record: Record, stands: Sequence[Record]) -> list[JudgedMetric]:
    """The main figure of a record against the record it replaces, the best policy at its capacity, and dense."""
    rivals = _judged(record, _rivals(record, stands))
    same_cell = _judged(record, [r for r in stands if r.cell_id == record.cell_id])
    dense = _judged(record, [r for r in stands if r.cell.policy == "dense" and question(r) == question(record)])
    best = sorted(rivals, key=lambda j: j.difference.a or 0.0, reverse=_more_is_better(record))[:1]
    return list({id(j.a): j for j in [*same_cell, *best, *dense]}.values())


def _repeats(review: Review) -> list[str]:
    """What was measured again."""
    if not review.repeatable:
        return ["No cell can be measured again here: none has a built-in model and figures that don't depend on the machine.\n"]
    done = [repeat for repeat in review.repeats if repeat.again is not None]
    rows = [_row(repeat) for repeat in review.repeats]
    unlike = sum(bool(repeat.differs) for repeat in done)
    verdict = f"**{unlike} of them differ{'s' if unlike == 1 else ''}**" if unlike else "all agree" if done else "none could be"
    return [
        f"Measured again: {len(done)} of {review.repeatable} cells, drawn with the seed `{md(review.seed)}`: {verdict}.\n",
        *table(["cell", "submitted", "measured", "result", "machine"], rows, "lrrll"),
    ]


def _row(repeat: Repeat) -> list[str]:
    submitted, again = repeat.submitted, repeat.again
    cell, figure = md(cell_name(submitted, submitted)), md(sections.headline(submitted))
    if again is None:
        return [cell, figure, "", f"not measured: {md(repeat.refused)}", ""]
    result = f"**differs**: {md('; '.join(repeat.differs))}" if repeat.differs else "agrees"
    return [cell, figure, md(sections.headline(again)), result, md(setup_changes(submitted, again, "torch") or "alike")]


def _tally(record: Record, stands: Sequence[Record]) -> list[str]:
    """How many policies at its capacity a record beats."""
    verdicts = Counter(j.difference.verdict for j in _judged(record, _rivals(record, stands)))
    if not verdicts:
        return []
    counts = ", ".join(f"{verdicts[v]} {v}" for v in _VERDICTS if verdicts[v])
    return [f"- {md(cell_name(record, record))}, against the {verdicts.total()} at its capacity: {counts}"]


def _rivals(record: Record, stands: Iterable[Record]) -> list[Record]:
    """Other policies that read the same text at the same capacity, and evict at the same moments."""
    cell = record.cell
    return [
        r
        for r in stands
        if r.cell_id != record.cell_id and (r.cell.capacity, r.cell.evicts) == (cell.capacity, cell.evicts)
        and question(r) == question(record)
    ]  # fmt: skip


def _judged(record: Record, others: Iterable[Record]) -> list[JudgedMetric]:
    """The main figure of a record against that of others."""
    judged = []
    for other in others:
        means = [d for d in differences(other, record) if d.metric in ("nll", "accuracy", "score")]
        judged += [JudgedMetric(other, record, d) for d in means[:1]]
    return judged


def _more_is_better(record: Record) -> bool:
    scores = record.measured(ScoreMetrics)
    if scores is not None and scores.scores is not None:
        return scores.higher_is_better
    return not hasattr(record.metrics, "nll")
